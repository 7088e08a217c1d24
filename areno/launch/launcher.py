"""What starts worker processes, and how such a process is seen by whoever has asked for it."""

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

NODE = "ARENO_NODE"
"""Variable of a worker: name of its machine."""

_POLL_S, _AT_ONCE = 0.05, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process to start: a module that is run by Python, and that dials (:func:`areno.launch.links.dial`).

    Attributes:
        role, number: whose and which of its workers it is; the launcher knows what that role needs.
        environment: variables beside those of the machine that it runs on.
        log_file: gets its output; None leaves it where the launcher's goes.
    """

    role: str
    number: int
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None

    @property
    def name(self) -> str:
        """Role and number."""
        return f"{self.role}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeed:
    """What each of the ``workers`` of a role needs. Names that are not explained are those of ``SchedulingSpec``."""

    workers: int = 1
    together: int = 1  # so many neighbours must be on one machine
    cpu: int = 1
    gpu: int = 0
    mem: int | None = None  # in GB; None is a share of the machine's
    env_vars: Mapping[str, str] = field(default_factory=dict)
    cmd: str | None = None  # starts Python in place of the one that the launcher finds
    additional_bash_cmds: Sequence[str] = ()
    image: str = ""
    container_type: str = "none"
    mount: str = ""
    nodelist: str | None = None
    exclude: str | None = None
    srun_additional_args: str = ""
    ray_placement_strategy: str = "shared"
    beside: str = ""  # role whose places, and devices, its workers share one by one

    def command(self, task: Task, python: str = sys.executable) -> list[str]:
        """What starts a task on its machine: in a container, behind shell commands, where that is asked for."""
        words = [*self._python(python), "-m", task.module, *task.arguments]
        if self.image and self.container_type != "none":
            binds = ["--bind", self.mount] if self.mount else []
            gpus = ["--nv"] if self.gpu else []
            words = [self.container_type, "exec", *gpus, *binds, self.image, *words]
        if self.additional_bash_cmds:
            words = ["bash", "-c", "\n".join(["set -e", *self.additional_bash_cmds, 'exec "$@"']), "bash", *words]
        return words

    def _python(self, own: str) -> list[str]:
        """What starts Python; a module that ``cmd`` names is another program's worker, whose place ours takes."""
        words = shlex.split(self.cmd or "")
        if "-m" in words:
            words = words[: words.index("-m")]
        return [own] if words in ([], ["python"], ["python3"]) else words


class RunningTask(Protocol):
    """A process on some machine, with the methods of :class:`subprocess.Popen` that are needed here.

    Attributes:
        pid: there; 0 while it is not known.
        node: name of the machine; empty for this one.
        returncode: None while it runs, as far as is known.
    """

    pid: int
    node: str
    returncode: int | None

    def poll(self) -> int | None:
        """``returncode``, as it is now."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired if it takes longer, in seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True)
class LinkedTask:
    """A task that has dialled."""

    process: RunningTask
    connection: Connection


@dataclass(frozen=True, slots=True)
class Names:
    """Where the tasks of a run find each other: below ``root``, which no other run has ever used."""

    options: NameOptions
    root: str


class Launcher(Protocol):
    """Starts tasks with what their roles need; to be closed.

    Attributes:
        names: None where all tasks are on this machine.
        host: address of this machine that the tasks reach.
    """

    names: Names | None
    host: str

    def start(self, tasks: Sequence[Task], timeout_s: float) -> list[LinkedTask]:
        """Start tasks, and wait until all have dialled. Raises EngineError: one cannot, or has not; all are ended then."""

    def resize(self, role: str, workers: int) -> None:
        """Have room for so many workers of a role. Raises EngineError, UsageError: there is none; all is as before then."""

    def close(self) -> None:
        """End what still runs, and give back what was reserved; a second call does nothing."""


class RemoteLauncher(ABC):
    """What launchers of tasks on other machines share: the tasks dial this process.

    Args:
        needs: of each role.
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
        """Start one task. Raises EngineError: the cluster has no place for it, or cannot start it."""

    @abstractmethod
    def resize(self, role: str, workers: int) -> None:
        """See :class:`Launcher`."""

    def start(self, tasks: Sequence[Task], timeout_s: float) -> list[LinkedTask]:
        """See :class:`Launcher`; they are launched at the same time."""
        deadline = time.monotonic() + timeout_s
        names = [f"{task.name}/{uuid.uuid4().hex}" for task in tasks]
        connections = [self.listener.expect(name) for name in names]
        with ThreadPoolExecutor(min(len(tasks), _AT_ONCE), thread_name_prefix="areno-launch") as pool:
            launched = [pool.submit(self._launch, task, name) for task, name in zip(tasks, names, strict=True)]
        processes = [future.result() for future in launched if future.exception() is None]
        try:
            processes = [future.result() for future in launched]
            return [
                LinkedTask(process, _dialled(task, process, connection, deadline, timeout_s))
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


def _dialled(
    task: Task, process: RunningTask, connection: Future[Connection], deadline: float, timeout_s: float
) -> Connection:
    while not connection.done():
        code = process.poll()
        where = f"{task.name} on {process.node}" if process.node else task.name
        if code is not None and not connection.done():
            raise EngineError(f"{where} ended with exit code {code} before it had connected")
        if time.monotonic() > deadline:
            raise EngineError(
                f"{where} has not connected within {timeout_s:g} s; the machines must reach each other: a worker dials the "
                "machine that has started it, on a port that the system chooses"
            )
        time.sleep(_POLL_S)
    return connection.result()
