"""A group of worker processes that are started, called and stopped together.

If a worker dies, is suspended by a signal, or makes no progress, all workers are killed. Every pending call raises an error
that states the failed rank, its last operation, and the cause.
"""

import contextlib
import functools
import logging
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno.cores import openmp_threads, usable_cores
from areno.engine import inference
from areno.engine.parallel.messages import Beat, Call, CallResult, Event, LogLine, Start, dumps, loads
from areno.errors import EngineError, UsageError
from areno.frames import FrameError, Frames
from areno.launch.launcher import Launcher, Names, RunningTask, Task
from areno.launch.local import LocalLauncher

# Processes send a heartbeat every second. A silent process counts as failed after STOPPED_S if a signal suspends it
# (SIGSTOP), else after SILENCE_S, because an import or an overloaded machine may delay a heartbeat.
STOPPED_S, SILENCE_S = 15.0, 180.0
STALL_S = 600.0
# Time for the other ranks to fail after the first one; time for an orderly end; time to write stacks.
_SETTLE_S, _END_S, _STACKS_S = 5.0, 10.0, 0.5
_MESSAGE_BYTES = 1 << 36
_MODULE = "areno.engine.parallel.worker"
# Time for workers on other machines to connect, if startup_s is None.
_DIAL_S = 300.0


@dataclass(slots=True, eq=False)
class _Rank:
    rank: int
    process: RunningTask
    frames: Frames
    node: str = ""  # the process's machine, if it may differ from this one
    waiting: dict[int, tuple[str, Future[Any]]] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    progress: float = -1.0
    moved: float = field(default_factory=time.monotonic)
    doing: str = "starting"
    sending: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Settings for starting the processes of a group.

    Attributes:
        name: prefix of the worker processes' log lines, such as ``rollout 1``. If a name is set, the parent process logs only
            the workers' warnings and errors.
        launcher: starts the processes. If None, the processes run on this machine.
        role: role of the processes for the launcher; see :class:`~areno.launch.launcher.Task`.
        first: number of the first process among the workers of this role.
    """

    name: str = ""
    launcher: Launcher | None = None
    role: str = ""
    first: int = 0
    log_file: Path | None = None  # receives their output; None inherits the starter's
    environment: Mapping[str, str] = field(default_factory=dict)  # additional environment variables
    threads: int | None = None  # PyTorch threads per process; None: OMP_NUM_THREADS, else an equal share of the cores
    startup_s: float | None = None  # time limit for creating their objects; None: no limit
    stall_option: str = "--stall-timeout"  # name of the user's option for ``stall_s``, for the error message

    @property
    def names(self) -> Names | None:
        """The name registry, from which processes get each other's addresses; None if all processes are on this machine."""
        return None if self.launcher is None else self.launcher.names


class WorkerGroup:
    """Worker processes. Each worker holds one object and calls the object's methods.

    Args:
        makers: one function per rank, which creates the rank's object. The functions are serialized with ``cloudpickle``. The
            only argument of each function is a callback that sends events to the group.
        on_event: receives the rank and the payload of each event, in the group's thread.
        on_failure: called once when the group fails.
        busy: returns whether a rank has work that is not a method call, for example a running generation request.
        stall_s: time limit in seconds. A rank that has work but makes no progress for this time counts as failed.

    Raises:
        EngineError: a worker could not be started, or could not create its object. If all workers raise errors of the same
            type, the first worker's error is raised instead.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[Callable[[Any], None]], Any]],
        *,
        on_event: Callable[[int, Any], None] = lambda _rank, _payload: None,
        on_failure: Callable[[EngineError], None] = lambda _error: None,
        busy: Callable[[int], bool] = lambda _rank: False,
        processes: Processes | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._processes = processes or Processes(threads=1)
        self._on_event, self._on_failure, self._busy, self._stall_s = on_event, on_failure, busy, stall_s
        self._lock = threading.Lock()
        self._numbers = 0
        self._failure: EngineError | None = None
        self._closing = False
        chosen = self._processes.threads or openmp_threads()
        threads, sharing = chosen or max(usable_cores() // len(makers), 1), 0 if chosen else len(makers)
        self.size = len(makers)
        self._ranks = _start_ranks(self.size, threads, self._processes)
        started: list[Future[Any]] = []
        for rank in self._ranks:
            started.append(Future())
            rank.waiting[0] = ("start", started[-1])
        self._thread = threading.Thread(target=self._watch, name="areno-workers", daemon=True)
        self._thread.start()
        limit = self._processes.startup_s
        late = (
            f"the worker processes have not started within {limit} s; their log may say why. If they only need more time, "
            "raise the setting actor.setup_timeout or rollout.setup_timeout of `areno run`"
        )
        timer = threading.Timer(limit or 0.0, self.abandon, [late])
        if limit is not None:
            timer.start()
        try:
            for rank, make in zip(self._ranks, makers, strict=True):
                start = Start(make, list(sys.path), threads, sharing, self._processes.log_file is not None)
                with contextlib.suppress(OSError):  # the watching thread reports why
                    self._send(rank, dumps(start))
            self._gather("start", range(self.size), started)
        except BaseException:
            self._end(None)
            raise
        finally:
            timer.cancel()

    @property
    def failed(self) -> bool:
        """Whether the group has failed. If one rank fails, the whole group fails."""
        return self._failure is not None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closing

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def call(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method on ``ranks`` (default: all ranks). Return the results in the order of ``ranks``.

        If all ranks raise exceptions of the same type, the first rank's exception is raised, and the group stays usable. With
        any other exceptions, or if a rank dies, is suspended or makes no progress, the group fails, and EngineError is raised.
        """
        return self.begin(method, *arguments, ranks=ranks)()

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> Callable[[], list[Any]]:
        """Send a call; return a function that waits for the results. See :meth:`call`."""
        asked = range(self.size) if ranks is None else ranks
        return functools.partial(self._gather, method, asked, self._ask(method, arguments, asked))

    def tell(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        """Call a fast method on one rank immediately, even while the rank runs another call. Return a future of the result."""
        return self._ask(method, arguments, [rank], now=True)[0]

    def abandon(self, reason: str) -> None:
        """Kill all processes. Every later call raises an EngineError with this reason."""
        self._fail(EngineError(reason))

    def close(self) -> None:
        """Stop all processes. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        if self._failure is None:
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    self._send(rank, dumps(Call(-1, "")))
        self._end(_END_S)

    # -- asking ----------------------------------------------------------------------------------------------------

    def _ask(
        self, method: str, arguments: tuple[Any, ...], ranks: Sequence[int], now: bool = False
    ) -> list[Future[Any]]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise _stopped(method)
            self._numbers += 1
            number = self._numbers
        text = dumps(Call(number, method, dumps(arguments), now))
        futures: list[Future[Any]] = []
        for index in ranks:
            rank = self._ranks[index]
            future: Future[Any] = Future()
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                rank.moved = time.monotonic()
                rank.waiting[number] = (method, future)
            futures.append(future)
            with contextlib.suppress(OSError):  # the watching thread reports why
                self._send(rank, text)
        return futures

    @staticmethod
    def _send(rank: _Rank, text: bytes) -> None:
        with rank.sending:
            rank.frames.send(text, SILENCE_S)

    def _gather(self, method: str, ranks: Sequence[int], futures: list[Future[Any]]) -> list[Any]:
        """Wait for the results of all ranks, and return them.

        If all ranks raise errors of the same type, raise one of these errors; the group can still be used. If only some ranks
        raise errors, or the errors differ in type, the group fails.
        """
        wait(futures, return_when=FIRST_EXCEPTION)
        wait(futures, timeout=_SETTLE_S)
        done = [(rank, future) for rank, future in zip(ranks, futures, strict=True) if future.done()]
        errors = [(rank, future.exception()) for rank, future in done if future.exception() is not None]
        if not errors:
            return [future.result() for future in futures]
        rank, error = errors[0]
        assert error is not None
        if self._failure is not None:
            raise self._failure
        if self._closing or (len(errors) == len(futures) and len({type(e) for _, e in errors}) == 1):
            raise error
        failure = EngineError(
            f"rank {rank} of {self.size} failed during {method}: {type(error).__name__}: {error}"
            + "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        )
        failure.__cause__ = error
        self._fail(failure)
        raise failure

    # -- watching --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_ranks()
        except Exception as error:  # without this thread every call would wait forever
            failure = EngineError(f"the worker processes can no longer be watched: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _watch_ranks(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.frames, selectors.EVENT_READ, rank)
            while selector.get_map() and self._failure is None:
                for key, _ in selector.select(1.0):
                    if not self._listen(key.data):
                        selector.unregister(key.fileobj)
                self._check()

    def _listen(self, rank: _Rank) -> bool:
        """Read a rank's messages. Return False if the connection is closed or a message is invalid."""
        rank.heard = time.monotonic()  # even in the middle of a long message
        try:
            for text in rank.frames.arrived():
                self._take(rank, loads(text))
        except EOFError:
            self._ended(rank)
            return False
        except Exception as error:
            problem = "sent data that is not a message" if isinstance(error, FrameError) else "sent an invalid message"
            self._fail(EngineError(f"{self._named(rank)} {problem}: {type(error).__name__}: {error}"))
            return False
        return True

    def _take(self, rank: _Rank, message: Any) -> None:
        if isinstance(message, Beat):
            rank.doing = message.doing
            if message.progress != rank.progress:
                rank.progress, rank.moved = message.progress, rank.heard
        elif isinstance(message, CallResult):
            with self._lock:
                _, future = rank.waiting.pop(message.number, ("", None))
                if future is None and self._failure is None:
                    raise ValueError(f"received a result of call {message.number}, but this call is not pending")
            if future is None:  # the group has failed meanwhile
                return
            if message.error is None:
                future.set_result(message.value)
            else:
                if not isinstance(message.error, UsageError):  # its message is complete without a traceback
                    message.error.add_note(f"Traceback of rank {rank.rank}:\n{message.trace}")
                future.set_exception(message.error)
        elif isinstance(message, Event):
            self._on_event(rank.rank, message.payload)
        elif isinstance(message, LogLine):
            self._log(rank.rank, message)
        else:
            raise TypeError(f"{message!r:.80}")

    def _named(self, rank: _Rank) -> str:
        node = f" on {rank.node}" if rank.node else ""
        return f"rank {rank.rank} of {self.size} (process {rank.process.pid}{node})"

    def _log(self, rank: int, line: LogLine) -> None:
        name = self._processes.name
        if line.level >= logging.WARNING or not name:
            source = name if self.size == 1 else f"{name} rank {rank}".strip()
            says_itself = not name and line.logger == inference.logger.name  # its lines name the replica: dp=1/2
            text = f"[{source}] {line.text}" if (name or rank) and not says_itself else line.text
            logging.getLogger(line.logger).log(line.level, "%s", text)

    def _check(self) -> None:
        """End the group with an error if a rank has ended, is silent or makes no progress."""
        now = time.monotonic()
        for rank in self._ranks:
            if self._closing or rank.process.poll() is not None:
                # The connection may outlive the process, for example if a child process holds it. A local process may have
                # sent messages that have not been read yet.
                if rank.node or now - rank.heard > _SETTLE_S:
                    self._ended(rank)
                continue
            silent = now - rank.heard
            stopped = silent > STOPPED_S and not rank.node and _is_stopped(rank.process.pid)
            if silent > SILENCE_S or stopped:
                self._fail(
                    EngineError(
                        f"{self._named(rank)} has sent no heartbeat for {silent:.0f} s"
                        f"{' and is suspended by a signal' * stopped}; its last known operation is {_last(rank)}"
                    )
                )
            with self._lock:
                owes = bool(rank.waiting)
            if not owes and not self._busy(rank.rank):
                rank.moved = now
            elif now - rank.moved > self._stall_s:
                self._write_stacks()
                self._fail(
                    EngineError(
                        f"{self._named(rank)} has made no progress for {now - rank.moved:.0f} s during {_last(rank)}; if the "
                        f"operation needs more time, raise {self._processes.stall_option}; the stacks of all ranks are in "
                        f"{self._processes.log_file or 'the error output'}"
                    )
                )

    def _write_stacks(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)

    def _ended(self, rank: _Rank) -> None:
        if self._closing:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(timeout=2.0)
        code = rank.process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        if code is None and rank.node:
            how = "became unreachable (the process, its machine or the network has failed)"
        hint = "; the system may have run out of memory" if code == -9 else ""
        self._fail(EngineError(f"{self._named(rank)} {how} during {_last(rank)}{hint}"))

    def _fail(self, error: EngineError) -> None:
        """Kill all processes, and end all pending calls with ``error``."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            waiting = [future for rank in self._ranks for _, future in rank.waiting.values()]
            for rank in self._ranks:
                rank.waiting = {}
        for rank in self._ranks:
            rank.process.kill()
        for future in waiting:
            future.set_exception(error)
        self._on_failure(error)

    def _end(self, patience_s: float | None) -> None:
        self._closing = True  # first, so that the watching thread does not report the kills below
        deadline = time.monotonic() + (patience_s or 0.0)
        for rank in self._ranks:
            if patience_s is not None and self._failure is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            rank.process.kill()
            rank.process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        with self._lock:
            waiting = [call for rank in self._ranks for call in rank.waiting.values()]
            for rank in self._ranks:
                rank.waiting = {}
        for method, future in waiting:
            future.set_exception(_stopped(method))
        for rank in self._ranks:
            rank.frames.close()


def _start_ranks(size: int, threads: int, processes: Processes) -> list[_Rank]:
    launcher = processes.launcher or LocalLauncher()
    far = processes.names is not None
    tasks = [
        Task(
            role=processes.role,
            number=processes.first + rank,
            module=_MODULE,
            # A launcher gives each process its own devices, numbered from 0.
            environment={
                **processes.environment,
                "LOCAL_RANK": str(0 if far else rank),
                "OMP_NUM_THREADS": str(threads),
            },
            log_file=processes.log_file,
        )
        for rank in range(size)
    ]
    started = launcher.start(tasks, processes.startup_s or _DIAL_S)
    return [
        _Rank(rank, task.process, task.connection.frames(_MESSAGE_BYTES), task.process.node)
        for rank, task in enumerate(started)
    ]


def _stopped(method: str) -> EngineError:
    return EngineError(f"the call of {method} failed because the worker processes have been stopped")


def _last(rank: _Rank) -> str:
    return next((method for method, _ in rank.waiting.values()), "") or rank.doing or "work between calls"


def _is_stopped(pid: int) -> bool:
    """Whether a signal has suspended a process. False if the state of the process is unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False
