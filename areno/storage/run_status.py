"""The status of a run in ``status.json``: running, finished, stopped by a signal, or failed with an error.

A process that is killed cannot record its end, so the status in the file stays ``running``. :func:`read_status` recognizes
such a run: no process holds the lock of its run directory.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from areno.errors import ArenoError
from areno.storage.run_dir import RunDirectory
from areno.storage.run_lock import is_locked

RUNNING, FINISHED, STOPPED, FAILED, KILLED = "running", "finished", "stopped", "failed", "killed"


@contextmanager
def recorded_status(run_dir: RunDirectory) -> Iterator[None]:
    """Record the start and the end of the ``with`` block in the status of the run."""
    status: dict[str, Any] = {
        "state": RUNNING,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time(),
    }
    run_dir.write_status(status)
    try:
        yield
    except BaseException as error:
        _end(run_dir, status, _outcome(error))
        raise
    _end(run_dir, status, {"state": FINISHED})


def read_status(run_dir: RunDirectory) -> dict[str, Any]:
    """Return the recorded status of a run; {} if there is no record.

    The keys include ``state`` and ``started``. A run that has recorded its end also has ``ended``. A stopped run also has
    ``signal``, and a failed run has ``error``. If the process exited without recording its end, ``state`` is ``killed``.
    """
    status = run_dir.read_json(run_dir.status_path)
    if status.get("state") == RUNNING and not is_locked(run_dir.path):
        status["state"] = KILLED
    return status


def _outcome(error: BaseException) -> dict[str, Any]:
    signum = getattr(error, "signum", None)
    if isinstance(error, KeyboardInterrupt):
        signum = signal.SIGINT
    if signum is not None:
        return {"state": STOPPED, "signal": signal.Signals(signum).name}
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = error.code or 0
        if code - 128 in [*signal.Signals]:
            return {"state": STOPPED, "signal": signal.Signals(code - 128).name}
        if code == 0:
            return {"state": FINISHED}
    return {"state": FAILED, "error": f"{type(error).__name__}: {error}"}


def _end(run_dir: RunDirectory, status: dict[str, Any], outcome: dict[str, Any]) -> None:
    try:
        run_dir.write_status({**status, **outcome, "ended": time.time()})
    except ArenoError:  # a full disk must not replace the error that ended the run
        return
