"""The supervisor of a worker process: ends everything that the worker has started, whatever ends the worker or the trainer.

:func:`supervised` forks. The child is the worker. The parent does nothing but wait, and adopts processes whose own parent has
ended, so that neither ``setsid`` nor a second fork takes a process out of its reach. Without ``/proc`` (outside Linux) only
the worker's process group is ended.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

from areno.frames import Frames

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = (signal.SIGCHLD, signal.SIGIO, signal.SIGTERM)
# Where memory runs out, the kernel is to end a worker rather than the trainer.
_OOM_SCORE = "500"


def supervised(lifeline: int, connection: int) -> Frames:
    """Fork, and return in the child, which is the worker: its connection to the trainer. Its output goes to stderr.

    Args:
        lifeline: a socket whose other end the trainer holds; everything ends when that is shut or closed, even by SIGKILL.
        connection: of the worker to the trainer; the supervisor closes it, so that the worker's end shows at once.
    """
    fork_supervised(lifeline, connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the user prints belongs to the log, not into the trainer's output
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return Frames.join(connection)


def fork_supervised(lifeline: int, connection: int | None = None) -> None:
    """Fork, and return in the child, which ends with all that it starts when the lifeline does; see :func:`supervised`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # `sigwait` takes them
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        if connection is not None:
            os.close(connection)
        _supervise(worker, lifeline)
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it has ended before that was set
        os._exit(1)
    os.close(lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that these have started, as far as they run."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        following = children.get(waiting.pop(), [])
        found.update(following)
        waiting += following
    return found


def _supervise(worker: int, lifeline: int) -> NoReturn:
    status: int | None = None
    while status is None and not select.select([lifeline], [], [], 0)[0]:
        status = _reap(worker)
        if status is None and signal.sigwait(_WATCHED) == signal.SIGTERM:
            _send({worker}, signal.SIGTERM)  # it may have something to put in order
    _end_descendants()
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # end in the same way as the worker did
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _reap(worker: int) -> int | None:
    """Collect processes that have ended; returns the status of the worker if it was among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == worker else found
    return found


def _end_descendants() -> None:
    """End all descendants and collect them. All are stopped before any is killed, so that none multiplies meanwhile."""
    if not os.path.isdir("/proc/self"):
        os.killpg(0, signal.SIGKILL)
    while True:
        known: set[int] = set()
        while new := descendants(os.getpid()) - known:
            known |= new
            _send(new, signal.SIGSTOP)
        _send(known, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _control(what: int, value: int) -> None:
    """``prctl``, where there is one."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)
