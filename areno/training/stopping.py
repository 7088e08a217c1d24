"""Handles Ctrl-C, SIGTERM and SIGHUP (a closed terminal) without losing a step.

A signal interrupts repeatable work (generation, rewards) at once. Work that changes weights or files is finished first. A
second signal aborts the run immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """The user or the system has requested a stop with the signal ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopController:
    """Raises :class:`StopRequested` after a signal.

    In a ``with`` block of :meth:`interruptible`, the signal raises the exception at once. Elsewhere, the exception is raised by
    the next call of :meth:`check`, or when the next such block begins. Thus, an update or a save is completed first.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._interruptible = False

    @contextmanager
    def signals(self) -> Iterator[StopController]:
        """Handle SIGINT, SIGTERM and SIGHUP in the ``with`` block.

        Signals that the process ignores, for example under nohup, stay ignored. Does nothing outside the main thread.
        """
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
        """Raise StopRequested if a stop was requested."""
        if self.requested is not None:
            raise StopRequested(self.requested)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal interrupt the ``with`` block. The block must contain only work that a resumed run can repeat."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
