"""Writes TensorBoard event files in a background thread.

Importing the writer may take seconds, so the thread imports it at the first write; the training loop only fills a queue.
Events are flushed after each step, because a run may be killed. The thread is not a daemon: when the main thread ends, the
writer thread writes what is left, so that nothing is lost without ``close``.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from areno.errors import ArenoError

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_CLOSE_DEADLINE_S = 60.0


class EventWriter:
    """Writes the scalars of a run as TensorBoard events.

    ``purge_step`` is the first step that a resumed run writes again; TensorBoard hides older events of this and later steps.
    ``option`` is the option that sets the folder, for error messages.
    """

    name = "TensorBoard"

    def __init__(self, log_dir: str | Path, purge_step: int | None = None, option: str = "--metrics-log-dir") -> None:
        self._option = option
        self._log_dir = Path(log_dir)
        self._purge_step = purge_step
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float], float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._closed = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue one step. Raises ArenoError if an earlier write failed, or the writer is closed."""
        if self._closed:
            raise ArenoError(f"the event writer of {self._log_dir} is closed; create a new one to record step {step}")
        self._raise_failure()
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="areno-tensorboard")
            try:
                thread.start()
            except RuntimeError as error:
                raise ArenoError(
                    f"cannot start a thread to write TensorBoard events: {error}; end other programs, or raise the limit "
                    "of processes and threads (`ulimit -u`)"
                ) from error
            self._thread = thread
        self._queue.put((step, dict(numbers), time.time()))

    def close(self) -> None:
        """Write the queued events and close the file; idempotent. Raises ArenoError if a write failed or hangs."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(_CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise ArenoError(
                f"writing TensorBoard events to {self._log_dir} did not finish within {_CLOSE_DEADLINE_S:.0f} s; "
                "check the disk; metrics.jsonl has the same values"
            )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            remedy = "metrics.jsonl has the same values"
            if isinstance(self._failure, OSError):
                remedy = f"check the disk, or choose another folder with {self._option}"
            message = f"cannot write TensorBoard events to {self._log_dir}: {self._failure}; {remedy}"
            raise ArenoError(message) from self._failure

    def _work(self) -> None:
        try:
            # Slow to import, so not in the training loop.
            from torch.utils.tensorboard import SummaryWriter

            self._wait_for_a_later_name()
            writer = SummaryWriter(str(self._log_dir), purge_step=self._purge_step)
            with contextlib.closing(writer):
                while (entry := self._next()) is not None:
                    step, scalars, wall_time = entry
                    for tag, value in scalars.items():
                        writer.add_scalar(tag, value, step, walltime=wall_time)
                    writer.flush()
        except Exception as error:  # raised by the next `log` or `close`
            self._failure = error
            if not threading.main_thread().is_alive():
                _log.error(
                    "TensorBoard events in %s are incomplete, close() was never called: %s", self._log_dir, error
                )

    def _wait_for_a_later_name(self) -> None:
        """Wait for the next second if the folder already has a file from the current one.

        TensorBoard reads the files of a folder in the order of their names, which begin with the second of their creation.
        Within one second, the new file could be read first, and its ``purge_step`` would hide nothing.
        """
        prefix = f"events.out.tfevents.{int(time.time()):010d}."
        if any(self._log_dir.glob(prefix + "*")):
            time.sleep(1.0)

    def _next(self) -> tuple[int, dict[str, float], float] | None:
        """The next step to write; None after ``close``, or when the main thread has ended and the queue is empty."""
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if not threading.main_thread().is_alive():
                    return None
