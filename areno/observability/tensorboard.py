"""Writes TensorBoard event files in a background thread.

Importing ``tensorboard`` takes half a second, so the thread imports the package at the first write, and the training loop only
fills a queue. Events are flushed after each step, because a run may be killed. The thread is not a daemon: after the main
thread has ended, the thread still writes the queued events. So no event is lost if ``close`` is not called. PyTorch's
``SummaryWriter`` is not used, because it starts another thread. From Python 3.12 on, no thread can start once the main thread
has ended.
"""

import concurrent.futures.thread  # noqa: F401  imported here because its exit handler cannot be registered at exit
import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno.errors import ArenoError

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_CLOSE_DEADLINE_S = 60.0
_PREFIX = "events.out.tfevents."
_FORMAT = "brain.Event:2"  # TensorBoard's only format of event files


class EventWriter:
    """Writes the scalars of a run as TensorBoard events.

    ``purge_step`` is the first step of a resumed run. From this step on, TensorBoard hides the events that were recorded before
    the run was resumed. ``option`` is the option that sets the folder; error messages name this option.
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
        """Queue the scalars of one step.

        Raises ArenoError if an earlier write failed, if no thread can start, or if the writer is closed.
        """
        if self._closed:
            raise ArenoError(
                f"the event writer of {self._log_dir} is closed; create a new writer to record step {step}"
            )
        self._raise_failure()
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="areno-tensorboard")
            try:
                thread.start()
            except RuntimeError as error:
                raise ArenoError(
                    f"cannot start a thread to write TensorBoard events: {error}; stop other programs, or raise the "
                    "limit of processes and threads (`ulimit -u`)"
                ) from error
            self._thread = thread
        self._queue.put((step, dict(numbers), time.time()))

    def close(self) -> None:
        """Write the queued events and close the file. Further calls do nothing.

        Raises ArenoError if a write failed or does not finish in time.
        """
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
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter

            self._log_dir.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(RecordWriter(open(self._new_path(), "xb"))) as records:

                def write(step: int, seconds: float, **content: Any) -> None:
                    records.write(Event(step=step, wall_time=seconds, **content).SerializeToString())

                write(0, time.time(), file_version=_FORMAT)
                if self._purge_step is not None:
                    write(self._purge_step, time.time(), session_log=SessionLog(status=SessionLog.START))
                while (entry := self._next()) is not None:
                    step, scalars, seconds = entry
                    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                    write(step, seconds, summary=Summary(value=values))
                    records.flush()
        except Exception as error:  # raised by the next `log` or `close`
            self._failure = error
            if not threading.main_thread().is_alive():
                _log.error(
                    "TensorBoard events in %s are incomplete, because writing failed after the end of the main thread: %s",
                    self._log_dir,
                    error,
                )

    def _new_path(self) -> Path:
        """Return the path of a new file that sorts after the existing files of the folder.

        TensorBoard reads files in the order of their names, which begin with the creation time in seconds. The file of a
        resumed run must be read last, because its ``purge_step`` hides only events that TensorBoard has already read.
        """
        names = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in self._log_dir.glob(f"{_PREFIX}*")]
        second = max([int(time.time()), *(int(name) + 1 for name in names if name.isdecimal())])
        return self._log_dir / f"{_PREFIX}{second:010d}.{socket.gethostname()}.{os.getpid()}"

    def _next(self) -> tuple[int, dict[str, float], float] | None:
        """Wait for the next queued step, and return the step.

        Return None if no step will follow: after ``close``, or if the queue is empty and the main thread has ended.
        """
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if not threading.main_thread().is_alive():
                    return None
