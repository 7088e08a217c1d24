"""Where a rollout loop rests between two turns while somebody else changes the weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pause:
    """One at a time asks for a pause; the loop takes it before its next turn.

    A loop that goes in step with others first agrees with them before which turn that is. So there are three states: a
    pause is wanted, it is agreed, and the loop rests. The loop's condition ``wake`` guards them.
    """

    def __init__(self, wake: threading.Condition) -> None:
        self._wake = wake
        self._turns = threading.Lock()
        self.wanted = False
        self.agreed = False
        self.resting = False

    @contextmanager
    def held(self, stands: Callable[[], bool]) -> Iterator[None]:
        """Run the block while the loop rests, or while ``stands`` says that it takes no turns anyway."""
        with self._turns:
            with self._wake:
                self.wanted = True
                self._wake.notify_all()
                self._wake.wait_for(lambda: self.resting or stands())
            try:
                yield
            finally:
                with self._wake:
                    self.wanted = self.agreed = self.resting = False
                    self._wake.notify_all()

    def rest(self) -> None:
        """In the loop's thread: rest if that is agreed."""
        with self._wake:
            if self.agreed:
                self.resting = True
                self._wake.notify_all()
                self._wake.wait_for(lambda: not self.agreed)
