"""Worker processes of this machine, by role and replica.

Each replica is a group of processes with a log file of its own, and its failure is nobody else's. A replica that dies, is
stopped or makes no progress can be started again, after a pause that doubles each time, until its restarts are used up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from areno.engine.parallel.workers import Processes, WorkerGroup
from areno.errors import ArenoError, EngineError, UsageError
from areno.rollouts.scheduler.errors import (
    SchedulerError,
    WorkerCreationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "closed"]

TAIL_LINES = 50
# A replica that has run for so long has used up none of its restarts.
_STEADY_S = 600.0
_LONGEST_BACKOFF_S = 60.0


class Replica(Protocol):
    """What a job makes: something that lives in a group of processes."""

    workers: WorkerGroup

    def close(self) -> None:
        """End the processes."""
        ...


MakeReplica = Callable[[int, Processes, Callable[[EngineError], None]], Replica]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Replicas of one role.

    Attributes:
        role: such as ``rollout``; log files are named after it.
        replicas: how many.
        make: starts a replica, given its number, how its processes are to be started, and whom to tell of a failure.
        on_start: called with number and replica before it counts as ready; an error there is a failed start.
        on_ready: called with the number of a replica that is ready.
        on_lost: called with the number of a replica that has failed.
        on_given_up: called with the number of a replica that is not started again, and why.
        restarts: how often a replica is started again; 0 never does.
        backoff_s: pause before the first restart.
        threads: of PyTorch in each process.
        environment: variables for the processes, beside those of this one.
    """

    role: str
    replicas: int
    make: MakeReplica
    on_start: Callable[[int, Replica], None] = lambda _number, _replica: None
    on_ready: Callable[[int], None] = lambda _number: None
    on_lost: Callable[[int], None] = lambda _number: None
    on_given_up: Callable[[int, SchedulerError], None] = lambda _number, _error: None
    restarts: int = 3
    backoff_s: float = 1.0
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """One replica, as others see it.

    Attributes:
        id: ``role/number``.
        state: ``starting``, ``ready``, ``restarting``, ``failed`` or ``closed``.
        pids: its processes.
        log_file: what they log and print.
        restarts: how often it was started again.
        error: why it failed last; empty if it has not.
    """

    id: str
    state: State
    pids: tuple[int, ...]
    log_file: Path
    restarts: int
    error: str


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of a replica in a job; what is in it may change."""

    job: Job
    number: int
    log_file: Path
    state: State = "starting"
    replica: Replica | None = None
    since: float = 0.0
    used: int = 0
    restarts: int = 0
    error: str = ""
    thread: threading.Thread | None = None


class LocalScheduler:
    """See the module's text.

    Args:
        log_folder: gets ``{role}-{number}.log``.
        startup_timeout_s: how long a replica may take to start.
    """

    def __init__(self, log_folder: str | Path, startup_timeout_s: float = 300.0) -> None:
        self.log_folder = Path(log_folder)
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._startup_timeout_s = startup_timeout_s
        self._changed = threading.Condition()
        self._jobs: dict[str, list[_Slot]] = {}

    def create_workers(self, job: Job) -> list[str]:
        """Start all replicas of a job, at the same time; returns their ids when all are ready.

        Raises:
            UsageError: there is this role already, or a replica's arguments cannot work.
            WorkerCreationError: a replica could not be started; the others are ended.
        """
        slots = [_Slot(job, n, self.log_folder / f"{job.role}-{n}.log") for n in range(job.replicas)]
        with self._changed:
            if job.role in self._jobs:
                raise UsageError(f"there are workers of the role {job.role!r} already; delete_workers ends them")
            self._jobs[job.role] = slots
        with ThreadPoolExecutor(job.replicas, thread_name_prefix="areno-start") as pool:
            failures = [(s, error) for s, error in zip(slots, pool.map(self._start, slots), strict=True) if error]
        if failures:
            self.delete_workers(job.role)
            slot, error = failures[0]
            if isinstance(error, UsageError):
                raise error
            raise WorkerCreationError(
                f"{_name(slot)} could not be started: {_text(error)}\n{tail(slot.log_file)}"
            ) from error
        return [_name(slot) for slot in slots]

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """All replicas of a role.

        Args:
            role: of a job.
            timeout: seconds to wait until all are ready; None takes them as they are.

        Raises:
            WorkerNotFoundError: there is no such role.
            WorkerFailedError: one is not started again.
            WorkerTimeoutError: not all were ready in time.
        """
        with self._changed:
            slots = self._of(role)
            if timeout is not None:
                self._changed.wait_for(lambda: all(s.state in ("ready", "failed") for s in slots), timeout)
                for slot in slots:
                    if slot.state == "failed":
                        raise _given_up(slot)
                    if slot.state != "ready":
                        raise WorkerTimeoutError(
                            f"{_name(slot)} is {slot.state} after {timeout} s; see {slot.log_file}"
                        )
            return [_describe(slot) for slot in slots]

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """End the replicas of a role, or of all roles, the last one first if wanted.

        Raises:
            WorkerNotFoundError: there is no such role.
        """
        with self._changed:
            roles = list(self._jobs) if role is None else [role]
            slots = [slot for name in roles for slot in self._of(name)]
            for slot in slots:
                slot.state = "closed"
            self._changed.notify_all()
        for slot in reversed(slots) if reverse_order else slots:
            if slot.thread is not None:
                slot.thread.join()
            if slot.replica is not None:
                with contextlib.suppress(EngineError):
                    slot.replica.close()
        with self._changed:
            for name in roles:
                self._jobs.pop(name, None)

    def _of(self, role: str) -> list[_Slot]:
        if role not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            raise WorkerNotFoundError(f"there are no workers of the role {role!r}; roles: {known}")
        return self._jobs[role]

    # -- one replica -----------------------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> Exception | None:
        """Make a replica, or say why that did not work."""
        job = slot.job
        with open(slot.log_file, "a", encoding="utf-8") as log:
            log.write(f"==== {_name(slot)}, start {slot.restarts + 1}, {datetime.now():%Y-%m-%d %H:%M:%S} ====\n")
        processes = Processes(
            name=f"{job.role} {slot.number}",
            log_file=slot.log_file,
            environment=job.environment,
            threads=job.threads,
            startup_s=self._startup_timeout_s,
        )
        try:
            replica = job.make(slot.number, processes, functools.partial(self._lost, slot))
        except Exception as error:
            return error
        try:
            job.on_start(slot.number, replica)
        except Exception as error:
            replica.workers.abandon(str(error))
            replica.close()
            return error
        self._enter(slot, replica)
        return None

    def _enter(self, slot: _Slot, replica: Replica) -> None:
        with self._changed:
            closed = slot.state == "closed"
            if not closed:
                slot.replica, slot.state, slot.since = replica, "ready", time.monotonic()
                self._changed.notify_all()
        if closed:
            replica.close()
            return
        slot.job.on_ready(slot.number)
        if replica.workers.failed:  # before it was ready, so that nobody was told
            self._lost(slot, EngineError("it failed as soon as it was ready"))

    def _lost(self, slot: _Slot, error: EngineError) -> None:
        """A replica has failed; called in a thread of its own group. One that was not ready yet fails in its start."""
        with self._changed:
            if slot.state != "ready":
                return
            dead, slot.replica, slot.state, slot.error = slot.replica, None, "restarting", str(error)
            if time.monotonic() - slot.since > _STEADY_S:
                slot.used = 0
            name = f"areno-{slot.job.role}-{slot.number}"
            slot.thread = threading.Thread(target=self._revive, args=[slot, dead], name=name, daemon=True)
            slot.thread.start()

    def _revive(self, slot: _Slot, dead: Replica) -> None:
        """Start a replica again, as often as it may be."""
        job = slot.job
        logger.warning("%s has failed: %s", _name(slot), slot.error)
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
                logger.warning("%s runs again", _name(slot))
                return
            slot.error = _text(failure)
        with self._changed:
            if slot.state == "closed":
                return
            slot.state = "failed"
            self._changed.notify_all()
        job.on_given_up(slot.number, _given_up(slot))


def _given_up(slot: _Slot) -> WorkerFailedError:
    times = f"its {slot.used} restarts are used up" if slot.used else "it is not to be started again"
    return WorkerFailedError(f"{_name(slot)} has failed, and {times}: {slot.error}\n{tail(slot.log_file)}")


def _text(error: Exception) -> str:
    kind = "" if isinstance(error, ArenoError) else f"{type(error).__name__}: "
    return kind + "\n".join([str(error), *getattr(error, "__notes__", [])])


def tail(log_file: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, with a heading."""
    with open(log_file, encoding="utf-8", errors="replace") as file:
        last = deque(_stripped(file), lines)
    return f"The last {len(last)} lines of {log_file}:\n" + "\n".join(last)


def _stripped(lines: Iterator[str]) -> Iterator[str]:
    return (line.rstrip("\n") for line in lines)


def _name(slot: _Slot) -> str:
    return f"{slot.job.role}/{slot.number}"


def _describe(slot: _Slot) -> Worker:
    pids = tuple(slot.replica.workers.pids) if slot.replica is not None else ()
    return Worker(_name(slot), slot.state, pids, slot.log_file, slot.restarts, slot.error)
