"""Where the time of a step goes, as Chrome trace events: one file per role and rank, which Perfetto opens when converted.

    {logs}/perf_tracer/{role}/traces-r{rank}.jsonl     one event per line
    python -m areno.tools.perf_trace_converter ... out.json

Special here: events of all processes share one time axis (the system clock at the start, a steady clock from there on).
Scopes of asyncio tasks overlap, and a trace viewer can draw only nested ones on a track; so each task that is inside a
scope has a track of its own, used again by later tasks. A tracer that is off costs one test per scope.
"""

import asyncio
import functools
import heapq
import inspect
import json
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from areno.errors import ArenoError

Function = TypeVar("Function", bound=Callable[..., Any])

_FIRST_LANE = 1_000_000_000
"""Tracks of asyncio tasks; above every thread id of the operating system."""

_MARKER = "areno: profile begins"
"""Recorded while our clock is read; it says how far the profiler's time, which has a beginning of its own, is from ours."""


class Category(StrEnum):
    """What kind of work an event is."""

    IO = "io"
    SCHEDULER = "scheduler"
    MISC = "misc"


Args = Mapping[str, Any] | None
"""Shown with an event."""


def append_lines(path: Path, records: Sequence[Mapping[str, Any]], setting: str) -> None:
    """Append records as JSON lines; none make no file. Raises ArenoError: the file cannot be written."""
    if not records:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, default=str) + "\n" for record in records))
    except OSError as error:
        reason = error.strerror or error
        raise ArenoError(f"cannot write {path}: {reason}; check free disk space, or set {setting}=false") from error


def trace_path(logs: Path, role: str, rank: int) -> Path:
    """File of a role's rank below the run directory."""
    return logs / "perf_tracer" / role / f"traces-r{rank}.jsonl"


class PerfTracer:
    """Gathers events and appends them to a file.

    ``save_interval``: events are written at each step whose number, counted from 1, is a multiple of it; 0 and less mean 1.
    ``profile_steps``: global steps to run the torch profiler in. One that is off does nothing and makes no file.
    """

    def __init__(
        self,
        logs: str | Path,
        role: str = "trainer",
        rank: int = 0,
        *,
        enabled: bool = True,
        save_interval: int = 1,
        profile_steps: Sequence[int] | None = None,
    ) -> None:
        self.enabled = enabled
        self.path = trace_path(Path(logs), role, rank)
        self._save_interval = max(save_interval, 1)
        self._profile_steps = frozenset(profile_steps or ())
        self._common: dict[str, Any] = {"rank": rank, "role": role}
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._tracks: set[int] = set()
        self._free_lanes: list[int] = []
        self._lanes = 0
        self._lane: ContextVar[tuple[Any, int] | None] = ContextVar("track of the task", default=None)
        self._pid = os.getpid()
        self._metadata("process_name", 0, {"name": f"{role} {rank}"})
        self._metadata("process_sort_index", 0, {"sort_index": rank})

    @contextmanager
    def trace_scope(self, name: str, category: str = Category.MISC, args: Args = None) -> Iterator[None]:
        """Record the block as one event."""
        if not self.enabled:
            yield
            return
        start, track = time.perf_counter_ns(), self._track()
        try:
            yield
        finally:
            event = {"name": name, "ph": "X", "ts": self._us(start), "cat": str(category)}
            event["dur"] = max(1.0, (time.perf_counter_ns() - start) / 1000)
            self._add({**event, "pid": self._pid, "tid": track, "args": {**self._common, **(args or {})}})

    @asynccontextmanager
    async def atrace_scope(self, name: str, category: str = Category.MISC, args: Args = None) -> AsyncIterator[None]:
        """:meth:`trace_scope` for a block that waits."""
        if not self.enabled:
            yield
            return
        task, held = asyncio.current_task(), self._lane.get()
        if held is not None and held[0] is task:  # inside another scope of this task
            with self.trace_scope(name, category, args):
                yield
            return
        lane = self._take_lane()
        token = self._lane.set((task, lane))
        try:
            with self.trace_scope(name, category, args):
                yield
        finally:
            self._lane.reset(token)
            with self._lock:
                heapq.heappush(self._free_lanes, lane)

    def instant(self, name: str, category: str = Category.MISC, args: Args = None) -> None:
        """Record a moment."""
        if self.enabled:
            event = {"name": name, "ph": "i", "s": "t", "ts": self._us(time.perf_counter_ns()), "cat": str(category)}
            self._add({**event, "pid": self._pid, "tid": self._track(), "args": {**self._common, **(args or {})}})

    @contextmanager
    def step(self, global_step: int) -> Iterator[None]:
        """Number the block's events with its global step, and profile it with torch where that was asked for."""
        if not self.enabled:
            yield
            return
        self._common["global_step"] = global_step
        if global_step not in self._profile_steps:
            yield
            return
        events: list[dict[str, Any]] = []
        try:
            with profiled(events, lambda: self._us(time.perf_counter_ns()), self._pid):
                yield
        finally:
            for event in events:
                self._add({**event, "args": {**event.get("args", {}), **self._common}} if event["ph"] != "M" else event)

    def save(self, step: int | None = None, force: bool = False) -> None:
        """Append the events to the file, where ``save_interval`` says so for ``step`` or by ``force``. Raises ArenoError."""
        if not self.enabled or not (force or step is None or (step + 1) % self._save_interval == 0):
            return
        with self._lock:
            events, self._events = self._events, []
        append_lines(self.path, events, "perf_tracer.enabled")

    def _us(self, perf_ns: int) -> float:
        return (perf_ns + self._offset_ns) / 1000

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)

    def _metadata(self, name: str, track: int, args: Mapping[str, Any]) -> None:
        self._add({"name": name, "ph": "M", "ts": 0, "pid": self._pid, "tid": track, "args": dict(args)})

    def _track(self) -> int:
        """The track of the running task, or of the thread."""
        held = self._lane.get()
        if held is not None:
            with suppress(RuntimeError):  # no loop runs in this thread
                if held[0] is asyncio.current_task():
                    return held[1]
        track = threading.get_native_id()
        if track not in self._tracks:
            self._tracks.add(track)
            self._metadata("thread_name", track, {"name": threading.current_thread().name})
        return track

    def _take_lane(self) -> int:
        with self._lock:
            if self._free_lanes:
                return heapq.heappop(self._free_lanes)
            self._lanes += 1
            lane = _FIRST_LANE + self._lanes
        self._metadata("thread_name", lane, {"name": f"task {self._lanes}"})
        return lane


def traced(function: Function, name: str | None, category: str, tracer: Callable[[], PerfTracer]) -> Function:
    """``function`` with each call recorded by the tracer that ``tracer`` returns at that time."""
    shown = name or function.__qualname__
    return wrapped(
        function, lambda: tracer().trace_scope(shown, category), lambda: tracer().atrace_scope(shown, category)
    )


def wrapped(
    function: Function,
    scope: Callable[[], AbstractContextManager[None]],
    async_scope: Callable[[], AbstractAsyncContextManager[None]],
) -> Function:
    """``function`` with each call inside a new ``scope``, or ``async_scope`` where it is a coroutine function."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            async with async_scope():
                return await function(*args, **kwargs)

        return asynchronous  # type: ignore[return-value]

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return synchronous  # type: ignore[return-value]


@contextmanager
def profiled(events: list[dict[str, Any]], now_us: Callable[[], float], pid: int) -> Iterator[None]:
    """Profile the block with torch, CPU and GPU; afterwards ``events`` get what it found, in microseconds of ``now_us``."""
    from torch import profiler

    with profiler.profile() as profile:
        marked = now_us()
        with profiler.record_function(_MARKER):
            pass
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "torch.json")
        profile.export_chrome_trace(str(path))
        events.extend(_moved(json.loads(path.read_text())["traceEvents"], marked, pid))


def _moved(found: list[dict[str, Any]], marked: float, pid: int) -> Iterator[dict[str, Any]]:
    """The profiler's events with our times and track numbers, after one metadata event for each track."""
    begin = next((event["ts"] for event in found if event.get("name") == _MARKER), None)
    if begin is None:
        return
    tracks: dict[tuple[Any, Any], int] = {}
    for event in found:
        if event.get("ph") not in ("X", "i") or event["name"] == _MARKER:
            continue
        place = (event.get("pid"), event.get("tid"))
        if place not in tracks:
            tracks[place] = -len(tracks) - 1
            name = {"name": f"torch profiler {place[1]}"}
            yield {"name": "thread_name", "ph": "M", "ts": 0, "pid": pid, "tid": tracks[place], "args": name}
        kept: dict[str, Any] = {key: event[key] for key in ("name", "ph", "cat", "args", "s") if key in event}
        span = {"dur": max(1.0, float(event.get("dur", 0)))} if event["ph"] == "X" else {"s": "t"}
        yield {"cat": "instr", **kept, **span, "ts": event["ts"] - begin + marked, "pid": pid, "tid": tracks[place]}
