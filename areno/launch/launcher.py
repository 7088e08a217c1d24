"""Interfaces of launchers and of the worker processes that they start."""

import math
import shlex
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from areno.errors import EngineError
from areno.launch.links import Connection, Listener
from areno.name_resolve import NameOptions
from areno.python_process import python_command

NODE = "ARENO_NODE"
"""Environment variable that contains the name or the address of a worker's machine."""

_POLL_S, _AT_ONCE = 0.05, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A worker process to start.

    Attributes:
        role, number: role and index of the worker. The role determines the worker's :class:`RoleNeed`.
        module: Python module that the worker runs. It must call :func:`areno.launch.links.dial`, which connects the worker to
            the process that started the worker.
        environment: environment variables in addition to the inherited variables.
        log_file: file for the output of the task. If None, the task inherits the output of the process that starts the task.
    """

    role: str
    number: int
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None

    @property
    def name(self) -> str:
        """The role and the number of the worker."""
        return f"{self.role}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeed:
    """Number and resources of the workers of a role. Fields without a comment mean the same as in `SchedulingSpec`."""

    workers: int = 1
    together: int = 1  # number of consecutive workers that must be on one machine
    cpu: int = 1  # cores of a worker
    gpu: int = 0  # GPUs of a worker
    mem: int | None = None  # memory in GB per GPU, or per worker without GPUs; None requests none
    env_vars: Mapping[str, str] = field(default_factory=dict)
    cmd: str | None = None  # command that starts Python, instead of the default interpreter
    additional_bash_cmds: Sequence[str] = ()
    image: str = ""
    container_type: str = "none"
    mount: str = ""
    nodelist: str | None = None
    exclude: str | None = None
    srun_additional_args: str = ""
    ray_placement_strategy: str = "shared"
    beside: str = ""  # role with which this role is colocated; see `span`

    @property
    def memory_gb(self) -> int | None:
        """Memory in GB to request for a worker; None if no amount is requested."""
        return None if self.mem is None else self.mem * max(self.gpu, 1)

    def span(self, holder: "RoleNeed") -> int:
        """Return how many workers of ``holder`` share their cores and GPUs with one worker of this role.

        This role must be colocated with the role ``holder``. If ``span`` is the returned number, worker ``n`` of this role
        uses the GPUs of ``span`` consecutive workers of ``holder``, starting with worker ``n * span``.
        """
        return max(math.ceil(self.gpu / max(holder.gpu, 1)), 1)

    def command(self, task: Task, python: str = sys.executable) -> list[str]:
        """Return the command that starts a task.

        If the role has a container image, the command runs the task in a container. If the role has ``additional_bash_cmds``,
        a shell runs them first, outside the container.
        """
        words = [*self._python(python), "-m", task.module, *task.arguments]
        if self.image and self.container_type != "none":
            binds = ["--bind", self.mount] if self.mount else []
            gpus = ["--nv"] if self.gpu else []
            words = [self.container_type, "exec", *gpus, *binds, self.image, *words]
        if self.additional_bash_cmds:
            words = ["bash", "-c", "\n".join(["set -e", *self.additional_bash_cmds, 'exec "$@"']), "bash", *words]
        return words

    def _python(self, default: str) -> list[str]:
        words = shlex.split(self.cmd or "")
        if "-m" in words:
            words = words[: words.index("-m")]
        return python_command(default) if words in ([], ["python"], ["python3"]) else words


class RunningTask(Protocol):
    """A process on this or another machine, with some methods of :class:`subprocess.Popen`.

    Attributes:
        pid: process id on the machine of the process; 0 if unknown.
        node: name or address of the machine of the process; empty for this machine.
        returncode: exit code; None if the process was running at the last poll.
    """

    pid: int
    node: str
    returncode: int | None

    def poll(self) -> int | None:
        """Update and return ``returncode``."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process exits. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process."""

    def kill(self) -> None:
        """Kill the process."""


@dataclass(frozen=True, slots=True)
class LinkedTask:
    """A running task that has connected to this process."""

    process: RunningTask
    connection: Connection


@dataclass(frozen=True, slots=True)
class Names:
    """Settings of the name service with which the tasks of a run find each other; see :mod:`areno.name_resolve`.

    All names of a run begin with ``root``, a prefix that no other run uses.
    """

    options: NameOptions
    root: str


class Launcher(Protocol):
    """Starts tasks according to the :class:`RoleNeed` of each task's role. A launcher must be closed.

    Attributes:
        names: name service of the tasks; None if all tasks run on this machine.
        host: address at which the tasks reach this machine.
    """

    names: Names | None
    host: str

    def start(self, tasks: Sequence[Task], timeout_s: float) -> list[LinkedTask]:
        """Start tasks, and wait until all tasks have connected. If a task fails, kill all tasks and raise EngineError."""

    def resize(self, role: str, workers: int) -> None:
        """Reserve the resources that ``workers`` workers of a role need.

        The number ``workers`` includes the workers whose resources are already reserved.

        After an EngineError or UsageError, some of the new resources may stay reserved. To release these resources, call
        ``resize`` with the old number of workers.
        """

    def close(self) -> None:
        """Kill running tasks, and release reserved resources. A second call does nothing."""


class RemoteLauncher(ABC):
    """Base class of launchers that start tasks on other machines.

    Args:
        needs: resources of each role.
        names: see :class:`Launcher`.
        host: see :class:`Launcher`.
    """

    names: Names | None

    def __init__(self, needs: Mapping[str, RoleNeed], names: Names, host: str) -> None:
        self.needs, self.names, self.host = dict(needs), names, host
        self.listener = Listener(host)
        self._started: list[RunningTask] = []
        self._changing = threading.Lock()

    @abstractmethod
    def launch(self, task: Task) -> RunningTask:
        """Start one task.

        Raises:
            EngineError: the cluster has no resources for the task, or cannot start the task.
        """

    @abstractmethod
    def resize(self, role: str, workers: int) -> None:
        """See :class:`Launcher`."""

    def start(self, tasks: Sequence[Task], timeout_s: float) -> list[LinkedTask]:
        """See :class:`Launcher`. Tasks are launched concurrently."""
        deadline = time.monotonic() + timeout_s
        names = [f"{task.name}/{uuid.uuid4().hex}" for task in tasks]
        connections = [self.listener.expect(name) for name in names]
        with ThreadPoolExecutor(min(len(tasks), _AT_ONCE), thread_name_prefix="areno-launch") as pool:
            launched = [pool.submit(self._launch, task, name) for task, name in zip(tasks, names, strict=True)]
        processes = [future.result() for future in launched if future.exception() is None]
        try:
            processes = [future.result() for future in launched]
            return [
                LinkedTask(process, _wait_for_connection(task, process, connection, deadline, timeout_s))
                for task, process, connection in zip(tasks, processes, connections, strict=True)
            ]
        except BaseException:
            for name in names:
                self.listener.forget(name)
            for process in processes:
                with suppress(Exception):
                    process.kill()
            raise

    def _launch(self, task: Task, name: str) -> RunningTask:
        variables = {**self.needs[task.role].env_vars, **task.environment, **self.listener.environment(name)}
        process = self.launch(replace(task, environment=variables))
        with self._changing:
            self._started = [one for one in self._started if one.poll() is None] + [process]
        return process

    def close(self) -> None:
        """See :class:`Launcher`."""
        self.listener.close()
        with self._changing:
            started, self._started = self._started, []
        for process in started:
            if process.poll() is None:
                with suppress(Exception):
                    process.kill()


def _wait_for_connection(
    task: Task, process: RunningTask, connection: Future[Connection], deadline: float, timeout_s: float
) -> Connection:
    while not connection.done():
        code = process.poll()
        where = f"{task.name} on {process.node}" if process.node else task.name
        if code is not None and not connection.done():
            raise EngineError(f"{where} exited with code {code} before connecting to the process that started it")
        if time.monotonic() > deadline:
            raise EngineError(
                f"{where} has not connected within {timeout_s:g} s; make sure that the worker's machine can reach all ports of "
                "the machine that started the worker"
            )
        time.sleep(_POLL_S)
    return connection.result()
