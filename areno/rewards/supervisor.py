"""The supervisor kills all descendants of a worker process when the worker or the trainer exits.

:func:`supervised` calls ``os.fork``. The new child process becomes the worker, and the calling process becomes the supervisor.
The supervisor is a child subreaper: when a process between the supervisor and a descendant exits, the descendant becomes a
child of the supervisor. Neither ``setsid`` nor a double fork prevents this adoption. On systems without ``/proc``, such as
macOS, only the worker's process group is killed.
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
# If memory runs out, the kernel should kill a worker instead of the trainer.
_OOM_SCORE = "500"


def supervised(lifeline: int, connection: int) -> Frames:
    """Fork this process. The child becomes the worker, and the calling process becomes its supervisor.

    The call returns only in the worker, whose stdout then goes to stderr.

    Args:
        lifeline: socket to the trainer. The worker is killed when the trainer closes its end.
        connection: the worker's socket to the trainer. The supervisor closes its copy of this socket, so that the trainer gets
            EOF as soon as the worker exits.

    Returns:
        The worker's connection to the trainer.
    """
    fork_supervised(lifeline, connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # prints of user code must not mix with the trainer's output
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return Frames.join(connection)


def fork_supervised(lifeline: int, connection: int | None = None) -> None:
    """Fork, and return only in the child process.

    ``lifeline`` is a socket to the trainer. When the trainer closes its end or exits, the child and its descendants are killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # `sigwait` handles these signals
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
    if os.getppid() != supervisor:  # the parent ended before PDEATHSIG was set
        os._exit(1)
    os.close(lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def descendants(pid: int) -> set[int]:
    """Return the running descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    pids: set[int] = set()
    pending = [pid]
    while pending:
        started = children.get(pending.pop(), [])
        pids.update(started)
        pending += started
    return pids


def _supervise(worker: int, lifeline: int) -> NoReturn:
    status: int | None = None
    while status is None and not select.select([lifeline], [], [], 0)[0]:
        status = _reap(worker)
        if status is None and signal.sigwait(_WATCHED) == signal.SIGTERM:
            _send({worker}, signal.SIGTERM)  # so that it can clean up
    _kill_descendants()
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # end by the same signal as the worker
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _reap(worker: int) -> int | None:
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    return status


def _kill_descendants() -> None:
    """Kill and reap all descendants.

    All descendants are first suspended with SIGSTOP, because a running process could fork before it is killed.
    """
    if not os.path.isdir("/proc/self"):
        os.killpg(0, signal.SIGKILL)
    while True:
        stopped: set[int] = set()
        while new := descendants(os.getpid()) - stopped:
            stopped |= new
            _send(new, signal.SIGSTOP)
        _send(stopped, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _control(what: int, value: int) -> None:
    """Call ``prctl`` on systems that have this function."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)
