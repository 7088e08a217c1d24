"""Pause a rollout loop between two turns while another thread changes the weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pause:
    """Requests to pause the loop, served one at a time. The loop pauses before its next turn.

    Loops in lockstep first agree on the turn before which they pause. So a pause has three states: ``wanted`` (requested),
    ``agreed`` and ``resting``. The loop's condition ``wake`` guards all states.
    """

    def __init__(self, wake: threading.Condition) -> None:
        self._wake = wake
        self._turns = threading.Lock()
        self.wanted = False
        self.agreed = False
        self.resting = False

    @contextmanager
    def held(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Run the ``with`` block while the loop is paused. If ``stopped()`` is true, do not wait for the loop."""
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
        """Pause if a pause has been agreed on. Called from the loop's thread."""
        with self._wake:
            if self.agreed:
                self.resting = True
                self._wake.notify_all()
                self._wake.wait_for(lambda: not self.agreed)
