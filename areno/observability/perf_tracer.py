"""Records performance traces as Chrome trace events, in one file per role and rank.

    {logs}/perf_tracer/{role}/traces-r{rank}.jsonl     one event per line

To view the traces in Perfetto, merge these files into one file that Perfetto can open:

    python -m areno.tools.perf_trace_converter LOGS_OR_FILE... out.json

All processes share one time axis: a process reads the system clock at its start and a monotonic clock afterwards. Scopes of
different asyncio tasks can overlap without being nested. A trace viewer cannot draw such scopes on one track. So each task
gets its own track when it enters a scope. When the task leaves its outermost scope, another task can use the track.
"""

import asyncio
import heapq
import json
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Any

from areno.errors import ArenoError

_FIRST_TASK_TRACK = 1_000_000_000
"""Tracks of asyncio tasks have numbers above this limit. Thread ids of the operating system are below the limit."""

_MARKER = "areno: profile begins"
"""Name of the marker events at the start of a torch profile.

areno reads its own clock before and after each of these events. The offset between the profiler's clock and areno's clock is
the difference between the time of an event in the profile and the time that areno read before it.
"""
_MARKS = 5


class Category(StrEnum):
    """Category of an event."""

    IO = "io"
    SCHEDULER = "scheduler"
    MISC = "misc"


Args = Mapping[str, Any] | None
"""Arguments that a trace viewer shows with an event."""


def append_lines(path: Path, records: Sequence[Mapping[str, Any]], setting: str) -> None:
    """Append records to a file as JSON lines. Without records, no file is created. Raises ArenoError if writing fails."""
    if not records:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, default=str) + "\n" for record in records))
    except OSError as error:
        reason = error.strerror or error
        raise ArenoError(
            f"cannot write {path}: {reason}; check free disk space, or set {setting}=false (areno train: omit --trace)"
        ) from error


class PerfTracer:
    """Collects events and appends them to a file. A disabled tracer does nothing.

    ``save_interval`` is the number of steps after which events are written; values below 1 mean 1. ``profile_steps`` are the
    global steps in which the torch profiler runs.
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
        self.path = Path(logs) / "perf_tracer" / role / f"traces-r{rank}.jsonl"
        self._save_interval = max(save_interval, 1)
        self._profile_steps = frozenset(profile_steps or ())
        self._common: dict[str, Any] = {"rank": rank, "role": role}
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._tracks: set[int] = set()
        self._free_task_tracks: list[int] = []
        self._task_tracks = 0
        self._task_track: ContextVar[tuple[Any, int] | None] = ContextVar("track of the task", default=None)
        self._pid = os.getpid()
        self._metadata("process_name", 0, {"name": f"{role} {rank}"})
        self._metadata("process_sort_index", 0, {"sort_index": rank})

    @contextmanager
    def trace_scope(self, name: str, category: str = Category.MISC, args: Args = None) -> Iterator[None]:
        """Record the ``with`` block as an event with a duration."""
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
        """Record the ``async with`` block in the same way as :meth:`trace_scope`."""
        if not self.enabled:
            yield
            return
        task, current = asyncio.current_task(), self._task_track.get()
        if current is not None and current[0] is task:  # nested in another scope of this task
            with self.trace_scope(name, category, args):
                yield
            return
        track = self._take_task_track()
        token = self._task_track.set((task, track))
        try:
            with self.trace_scope(name, category, args):
                yield
        finally:
            self._task_track.reset(token)
            with self._lock:
                heapq.heappush(self._free_task_tracks, track)

    def instant(self, name: str, category: str = Category.MISC, args: Args = None) -> None:
        """Record an event without a duration."""
        if self.enabled:
            event = {"name": name, "ph": "i", "s": "t", "ts": self._us(time.perf_counter_ns()), "cat": str(category)}
            self._add({**event, "pid": self._pid, "tid": self._track(), "args": {**self._common, **(args or {})}})

    @contextmanager
    def step(self, global_step: int) -> Iterator[None]:
        """Add ``global_step`` to the arguments (:data:`Args`) of each event that is recorded until the next step begins.

        If ``profile_steps`` contains ``global_step``, the torch profiler runs during the block.
        """
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
        """Append the collected events to the file. Raises ArenoError if the file cannot be written.

        With ``step``, the events are written only every ``save_interval`` steps. With ``force``, the events are written in any
        case.
        """
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
        current = self._task_track.get()
        if current is not None:
            with suppress(RuntimeError):  # no event loop in this thread
                if current[0] is asyncio.current_task():
                    return current[1]
        track = threading.get_native_id()
        if track not in self._tracks:
            self._tracks.add(track)
            self._metadata("thread_name", track, {"name": threading.current_thread().name})
        return track

    def _take_task_track(self) -> int:
        with self._lock:
            if self._free_task_tracks:
                return heapq.heappop(self._free_task_tracks)
            self._task_tracks += 1
            track = _FIRST_TASK_TRACK + self._task_tracks
        self._metadata("thread_name", track, {"name": f"task {self._task_tracks}"})
        return track


@contextmanager
def profiled(events: list[dict[str, Any]], now_us: Callable[[], float], pid: int) -> Iterator[None]:
    """Profile the block on CPU and GPU with torch, and append the profiler's events to ``events``.

    The times of the events are converted to the clock of ``now_us``, in microseconds.
    """
    from torch import profiler

    with profiler.profile() as profile:
        marks = []
        for _ in range(_MARKS):
            before = now_us()
            with profiler.record_function(_MARKER):
                pass
            marks.append((now_us() - before, before))
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "torch.json")
        profile.export_chrome_trace(str(path))
        events.extend(_realigned(json.loads(path.read_text())["traceEvents"], marks, pid))


def _realigned(profile: list[dict[str, Any]], marks: list[tuple[float, float]], pid: int) -> Iterator[dict[str, Any]]:
    """Yield the profiler's events with times on areno's clock.

    ``marks`` has the duration and the start of each marker event on areno's clock. The shortest one gives the offset between
    the clocks, because a longer one may have been interrupted by another process.

    The events of each thread or GPU stream become a separate track, which starts with a metadata event that names the track.
    """
    begins = sorted(event["ts"] for event in profile if event.get("name") == _MARKER)
    if len(begins) != len(marks):
        return
    (_, marked), begin = min(zip(marks, begins, strict=True))
    tracks: dict[tuple[Any, Any], int] = {}
    for event in profile:
        if event.get("ph") not in ("X", "i") or event["name"] == _MARKER:
            continue
        source = (event.get("pid"), event.get("tid"))
        if source not in tracks:
            tracks[source] = -len(tracks) - 1
            name = {"name": f"torch profiler {source[1]}"}
            yield {"name": "thread_name", "ph": "M", "ts": 0, "pid": pid, "tid": tracks[source], "args": name}
        fields: dict[str, Any] = {key: event[key] for key in ("name", "ph", "cat", "args", "s") if key in event}
        span = {"dur": max(1.0, float(event.get("dur", 0)))} if event["ph"] == "X" else {"s": "t"}
        yield {"cat": "instr", **fields, **span, "ts": event["ts"] - begin + marked, "pid": pid, "tid": tracks[source]}
