"""Pause a rollout loop between two iterations, while another thread changes the weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pause:
    """Lets other threads pause the loop before its next iteration. Only one thread at a time can pause the loop.

    A pause has three states: ``wanted`` (a thread has requested the pause), ``agreed`` (the loop pauses before its next
    iteration), and ``resting`` (the loop is paused). All ranks of a sharded replica must pause before the same iteration, so
    a pause is ``agreed`` only after the leading rank has broadcast the pause. The loop's condition variable ``wake``
    protects the states.
    """

    def __init__(self, wake: threading.Condition) -> None:
        self._wake = wake
        self._turns = threading.Lock()
        self.wanted = False
        self.agreed = False
        self.resting = False

    @contextmanager
    def held(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Pause the loop during the ``with`` block.

        If ``stopped`` returns True, the loop has ended or has not started, and the block starts at once.
        """
        with self._turns:
            with self._wake:
                self.wanted = True
                self._wake.notify_all()
                self._wake.wait_for(lambda: self.resting or stopped())
            try:
                yield
            finally:
                with self._wake:
                    self.wanted = self.agreed = self.resting = False
                    self._wake.notify_all()

    def rest(self) -> None:
        """If the loop must pause before its next iteration (``agreed`` is set), wait until the pause ends.

        The loop's thread calls this method before each iteration.
        """
        with self._wake:
            if self.agreed:
                self.resting = True
                self._wake.notify_all()
                self._wake.wait_for(lambda: not self.agreed)
