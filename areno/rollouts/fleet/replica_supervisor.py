"""Starts, supervises and restarts replicas in worker processes, and changes their number.

Each replica is a group of processes with a log file. The failure of a replica does not affect other replicas. A replica that
dies or makes no progress is restarted with exponential backoff, until its restarts are used up.
"""

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from areno.engine.parallel.workers import Processes
from areno.errors import ArenoError, EngineError, UsageError
from areno.launch.launcher import Launcher

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "closed"]

TAIL_LINES = 50
# Seconds that a replica must have run to get all its restarts back.
_STEADY_S = 600.0
_LONGEST_BACKOFF_S = 60.0


class WorkerCreationError(ArenoError):
    """A replica could not be started. The message ends with the last lines of the replica's log."""


class WorkerFailedError(ArenoError):
    """A replica failed and is not restarted. The message ends with the last lines of the replica's log."""


class Workers(Protocol):
    """The processes of a replica. If one process fails, an implementation must stop the others."""

    @property
    def failed(self) -> bool:
        """Whether a process has failed, or :meth:`abandon` was called."""

    @property
    def pids(self) -> Sequence[int]:
        """Ids of the running processes."""

    def abandon(self, reason: str) -> None:
        """Stop the processes, and mark them as failed."""


class Replica(Protocol):
    """An engine or a server, which runs in its own group of processes."""

    @property
    def workers(self) -> Workers:
        """The processes of the replica."""

    def close(self) -> None:
        """Stop the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJob:
    """Settings for starting and supervising the replicas of one role.

    Attributes:
        make: function that starts a replica. Its arguments are the replica's number, its process options and a failure
            callback.
        on_start: function ``(number, replica)`` that is called before the replica is ready. If it raises an error, the start
            fails.
        on_given_up: function ``(number, error)`` that is called for a failed replica that is not restarted.
    """

    role: str  # for log file names (``{role}-{number}.log``) and messages
    replicas: int
    log_folder: Path
    make: Callable[[int, Processes, Callable[[EngineError], None]], Replica]
    on_start: Callable[[int, Any], None] = lambda _number, _replica: None
    on_lost: Callable[[int], None] = lambda _number: None  # called with the number of a failed replica
    on_leaving: Callable[[int], None] = lambda _number: (
        None
    )  # called before a replica is ended; returns once it is unused
    on_given_up: Callable[[int, WorkerFailedError], None] = lambda _number, _error: None
    startup_timeout_s: float = 300.0
    restarts: int = 3  # allowed restarts per replica, the first after ``backoff_s`` seconds
    backoff_s: float = 1.0
    launcher: Launcher | None = None  # starts the ``ranks`` processes of each replica; None: on this machine
    ranks: int = 1
    threads: int = 1  # PyTorch threads per process
    environment: Mapping[str, str] = field(default_factory=dict)  # variables in addition to those of this process


@dataclass(frozen=True, slots=True)
class Worker:
    """State of one replica. ``id`` is ``role/number``. ``error`` is the last failure; empty if the replica has not failed."""

    id: str
    state: State
    pids: tuple[int, ...]
    log_file: Path
    restarts: int
    error: str


@dataclass(slots=True, eq=False)
class _Slot:
    """State of one numbered replica. A restarted replica keeps its number."""

    number: int
    name: str
    log_file: Path
    state: State = "starting"
    replica: Replica | None = None
    since: float = 0.0
    used: int = 0
    restarts: int = 0
    error: str = ""
    thread: threading.Thread | None = None


class ReplicaSupervisor:
    """Supervises the replicas of a job. A supervisor must be closed.

    The constructor starts all replicas concurrently, and returns when all replicas are ready.

    Raises:
        UsageError: a replica's arguments are invalid.
        WorkerCreationError: a replica could not be started. The other replicas are stopped.
    """

    def __init__(self, job: ReplicaJob) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._closed = False
        self._slots: list[_Slot] = []
        Path(job.log_folder).mkdir(parents=True, exist_ok=True)
        self.resize(job.replicas)

    def resize(self, replicas: int) -> None:
        """Change the number of replicas: start further replicas, or stop the last replicas as soon as they are unused. Calls
        must not overlap.

        Raises:
            UsageError, WorkerCreationError: as in the constructor. The number of replicas is then unchanged.
        """
        with self._changed:
            if self._closed:
                raise EngineError(f"the {self._job.role} replicas are closed")
            leaving, joining = self._slots[replicas:], range(len(self._slots), replicas)
            added = [self._slot(number) for number in joining]
            self._slots += added
        for slot in reversed(leaving):
            self._job.on_leaving(slot.number)
            self._end([slot])
        if added:
            self._start_all(added)

    def _slot(self, number: int) -> _Slot:
        role = self._job.role
        return _Slot(number, f"{role}/{number}", Path(self._job.log_folder) / f"{role}-{number}.log")

    def _start_all(self, slots: list[_Slot]) -> None:
        errors: dict[int, Exception | None] = {}

        def start(slot: _Slot) -> None:
            errors[slot.number] = self._start(slot)

        # Daemon threads, so that the program can end while a model is loading.
        threads = [threading.Thread(target=start, args=[slot], name="areno-start", daemon=True) for slot in slots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for slot in slots:
            if (error := errors.get(slot.number)) is None:
                continue
            for other in slots:
                self._job.on_leaving(other.number)
            self._end(slots)
            if isinstance(error, UsageError):
                raise error
            text = f"{slot.name} could not be started: {_text(error)}\n{tail(slot.log_file)}"
            raise WorkerCreationError(text) from error

    def workers(self) -> list[Worker]:
        """Return the current state of all replicas."""
        with self._changed:
            return [_describe(slot) for slot in self._slots]

    def close(self) -> None:
        """Stop all replicas. A second call does nothing."""
        self._closed = True
        self._end(self._slots)

    def _end(self, slots: Sequence[_Slot]) -> None:
        with self._changed:
            self._slots, slots = [slot for slot in self._slots if slot not in slots], list(slots)
            for slot in slots:
                slot.state = "closed"
            self._changed.notify_all()
        for slot in slots:
            if slot.thread is not None:
                slot.thread.join()
            if slot.replica is not None:
                with contextlib.suppress(EngineError):
                    slot.replica.close()

    # -- one replica -----------------------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> Exception | None:
        """Start a replica. Return None, or the error if the start failed."""
        job = self._job
        processes = Processes(
            name=f"{job.role} {slot.number}",
            launcher=job.launcher,
            role=job.role,
            first=slot.number * job.ranks,
            log_file=slot.log_file,
            environment=job.environment,
            threads=job.threads,
            startup_s=job.startup_timeout_s,
        )
        try:
            with open(slot.log_file, "a", encoding="utf-8") as log:
                log.write(f"==== {slot.name}, start {slot.restarts + 1}, {datetime.now():%Y-%m-%d %H:%M:%S} ====\n")
            replica = job.make(slot.number, processes, functools.partial(self._lost, slot))
        except Exception as error:
            return error
        if slot.state == "closed":
            replica.close()
            return None
        try:
            job.on_start(slot.number, replica)
        except Exception as error:
            replica.workers.abandon(str(error))
            with contextlib.suppress(EngineError):
                replica.close()
            return error
        with self._changed:
            closed = slot.state == "closed"
            if not closed:
                slot.replica, slot.state, slot.since = replica, "ready", time.monotonic()
        if closed:
            job.on_leaving(slot.number)
            replica.close()
        elif replica.workers.failed:  # the callback was ignored, because the replica was not ready yet
            self._lost(slot, EngineError("the replica failed as soon as it was ready"))
        return None

    def _lost(self, slot: _Slot, error: EngineError) -> None:
        with self._changed:
            if slot.state != "ready" or slot.replica is None:
                return
            dead, slot.replica, slot.state, slot.error = slot.replica, None, "restarting", str(error)
            if time.monotonic() - slot.since > _STEADY_S:
                slot.used = 0
            name = f"areno-{self._job.role}-{slot.number}"
            slot.thread = threading.Thread(target=self._revive, args=[slot, dead], name=name, daemon=True)
            slot.thread.start()

    def _revive(self, slot: _Slot, dead: Replica) -> None:
        """Try to restart a failed replica until the replica is ready or its restarts are used up."""
        job = self._job
        logger.warning("%s failed: %s", slot.name, slot.error)
        job.on_lost(slot.number)
        with contextlib.suppress(EngineError):
            dead.close()
        while slot.used < job.restarts:
            pause = min(job.backoff_s * 2**slot.used, _LONGEST_BACKOFF_S)
            with self._changed:
                if self._changed.wait_for(lambda: slot.state == "closed", pause):
                    return
            slot.used += 1
            slot.restarts += 1
            failure = self._start(slot)
            if failure is None:
                logger.warning("%s was restarted", slot.name)
                return
            slot.error = _text(failure)
        with self._changed:
            if slot.state == "closed":
                return
            slot.state = "failed"
        times = f"its {slot.used} restarts are used up" if slot.used else "restarts are disabled"
        text = f"{slot.name} failed, and {times}: {slot.error}\n{tail(slot.log_file)}"
        job.on_given_up(slot.number, WorkerFailedError(text))


def _text(error: Exception) -> str:
    kind = "" if isinstance(error, ArenoError) else f"{type(error).__name__}: "
    return kind + "\n".join([str(error), *getattr(error, "__notes__", [])])


def tail(log_file: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log file, with a heading. If the file cannot be read, return the reason."""
    try:
        with open(log_file, encoding="utf-8", errors="replace") as file:
            last = deque((line.rstrip("\n") for line in file), lines)
    except OSError as error:
        return f"The log cannot be read: {error}"
    return f"The last {len(last)} lines of {log_file}:\n" + "\n".join(last)


def _describe(slot: _Slot) -> Worker:
    pids = tuple(slot.replica.workers.pids) if slot.replica is not None else ()
    return Worker(slot.name, slot.state, pids, slot.log_file, slot.restarts, slot.error)
