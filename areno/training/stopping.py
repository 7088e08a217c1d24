"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal) without losing a step.

A signal may interrupt work that can be repeated (generating, rewarding) at once. Work that changes weights or files is
finished first. The second signal ends the process the hard way.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """The user or the system asked the run to stop; ``signum`` says how."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopController:
    """Turns signals into :class:`StopRequested` at safe moments."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self._interruptible = False

    @contextmanager
    def signals(self) -> Iterator[StopController]:
        """Handle the signals inside the block, but none that is ignored (nohup); does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        handled = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signum
        if self._interruptible:
            raise StopRequested(signum)

    def check(self) -> None:
        """Raise if a stop has been asked for."""
        if self.requested is not None:
            raise StopRequested(self.requested)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that may be left half-way, because it will be done again."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
