"""Starts workers on this machine. A private socket pair connects each worker to the process that starts it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import areno
from areno.launch.launcher import LinkedTask, Names, RoleNeed, Task
from areno.launch.links import LINK, Connection

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class LocalProcess(subprocess.Popen[bytes]):
    """See :class:`areno.launch.launcher.RunningTask`."""

    node = ""


class LocalLauncher:
    """See :class:`areno.launch.launcher.Launcher`.

    A task gets the environment variables and the command of its role's :class:`RoleNeed`, but no resources are reserved.
    """

    names: Names | None = None
    host = "127.0.0.1"

    def __init__(self, needs: Mapping[str, RoleNeed] | None = None) -> None:
        self.needs = dict(needs or {})

    def start(self, tasks: Sequence[Task], timeout_s: float) -> list[LinkedTask]:
        """See :class:`areno.launch.launcher.Launcher`.

        Each task inherits a socket that is already connected to this process. The launcher therefore does not wait for the
        tasks to connect, and ``timeout_s`` has no effect.
        """
        started: list[LinkedTask] = []
        try:
            for task in tasks:
                started.append(self._start(task))
        except BaseException:
            for linked in started:
                linked.process.kill()
                linked.process.wait()
                linked.connection.socket.close()
            raise
        return started

    def resize(self, role: str, workers: int) -> None:
        """Do nothing, because this launcher reserves no resources."""

    def close(self) -> None:
        """Do nothing, because the caller of :meth:`start` ends each task by closing its :class:`LinkedTask` connection."""

    def _start(self, task: Task) -> LinkedTask:
        need = self.needs.get(task.role, RoleNeed())
        ours, theirs = socket.socketpair()
        here = str(Path(areno.__file__).parents[1])
        environment = {"GLOO_SOCKET_IFNAME": _LOOPBACK, **os.environ, **need.env_vars, **task.environment}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        environment[LINK] = str(theirs.fileno())
        with theirs, open(task.log_file, "ab") if task.log_file else contextlib.nullcontext() as log:
            process = start_process(need.command(task), theirs.fileno(), environment, log)
        return LinkedTask(process, Connection(ours, None, dials=False))


def start_process(
    command: Sequence[str], file: int, environment: Mapping[str, str], log: IO[bytes] | None
) -> LocalProcess:
    """Start a command that inherits the file descriptor ``file`` and writes its output to ``log``."""
    return LocalProcess(command, pass_fds=[file], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
