"""The torch profiler's events of a block, moved onto the time axis and the tracks of a trace of our own.

Special here: the profiler counts time from a moment of its own. A marker that is recorded while our clock is read says
how far the two are apart, whatever that moment is in this version of torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MARKER = "areno: profile begins"
_KINDS = ("X", "i")


@contextmanager
def profiled(events: list[dict[str, Any]], now_us: Callable[[], float], pid: int) -> Iterator[None]:
    """Profile the block with torch, on the CPU and where there is one on the GPU.

    Args:
        events: gets the profiler's complete and instant events when the block has ended, with names of their tracks.
        now_us: the trace's clock, in microseconds.
        pid: of this process; all events get it, and tracks below 0.
    """
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
        if event.get("ph") not in _KINDS or event["name"] == _MARKER:
            continue
        place = (event.get("pid"), event.get("tid"))
        if place not in tracks:
            tracks[place] = -len(tracks) - 1
            name = {"name": f"torch profiler {place[1]}"}
            yield {"name": "thread_name", "ph": "M", "ts": 0, "pid": pid, "tid": tracks[place], "args": name}
        kept: dict[str, Any] = {key: event[key] for key in ("name", "ph", "cat", "args", "s") if key in event}
        span = {"dur": max(1.0, float(event.get("dur", 0)))} if event["ph"] == "X" else {"s": "t"}
        yield {"cat": "instr", **kept, **span, "ts": event["ts"] - begin + marked, "pid": pid, "tid": tracks[place]}
