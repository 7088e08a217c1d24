"""The timeline of an asynchronous run: sessions, phases and weight versions over time.

Phases need ``--trace`` or an experiment's ``perf_tracer``; sessions need its ``session_tracer``. The last sessions before a
time are found by bisection of the files, so that only a bounded part of a long run is read.
"""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from areno.viewer.catalog import OpenedRun, completed_steps
from areno.viewer.tails import json_records, lines_between, position_of

MAX_SESSIONS, MAX_SPANS = 400, 2000
_READ = 4 * 2**20
_LATEST = 1e18
_UPDATE = "update_weights"
_NO_PHASES = ("step",)
"""Events that only contain other events."""


def timeline(run: OpenedRun, until: float | None) -> dict[str, Any]:
    """The last sessions that ended before ``until`` (Unix seconds; None means the end), and the phases in this window.

    Returns:
        - ``begin`` and ``end`` of the window: the span of the sessions or, without sessions, the last minute
        - ``sessions`` in order of submission, each with ``task, session, role, begin, end, status, reason``, ``phases`` (a
          list of ``name, begin, end``) and ``version`` (the weight version when the session began)
        - ``phases`` of the trainer
        - ``versions`` (``version, time``), starting with the last version before the window
        - ``earlier``: the ``until`` of the previous window, or null
        - ``traced``: whether the run has traces
    """
    session_files, trace_files = run.traces("session_tracer"), run.traces("perf_tracer")
    sessions, earlier = _sessions(run, session_files, until)
    if sessions:
        begin, end = min(one["begin"] for one in sessions), max(one["end"] for one in sessions)
    else:
        end = until if until is not None else _last_event(run, trace_files)
        begin = end - 60
    phases = sorted(_phases(run, trace_files, begin, end), key=lambda span: float(span["begin"]))[:MAX_SPANS]
    versions = _versions(run, phases, begin, end)
    times = [one["time"] for one in versions]
    for session in sessions:
        place = bisect_right(times, session["begin"]) - 1
        session["version"] = versions[place]["version"] if place >= 0 else 0
    if not sessions and phases:
        begin, earlier = phases[0]["begin"], begin
    return {
        "begin": begin,
        "end": end,
        "sessions": sorted(sessions, key=lambda one: float(one["begin"])),
        "phases": phases,
        "versions": versions,
        "earlier": earlier,
        "traced": bool(session_files or trace_files),
    }


def _sessions(run: OpenedRun, files: list[Path], until: float | None) -> tuple[list[dict[str, Any]], float | None]:
    """The last sessions that ended before a time, and the time at which the previous window ends."""
    sessions, more = [], False
    for path in files:
        with run.open(path) as file:
            stop = file.seek(0, 2) if until is None else position_of(file, until, _ended)
            start, lines = lines_between(file, max(stop - _READ, 0), stop)
        more = more or start > 0
        sessions += [_session(record) for record in json_records(lines) if _is_session(record)]
    sessions = sorted(
        (one for one in sessions if until is None or one["end"] < until), key=lambda one: float(one["end"])
    )
    more = more or len(sessions) > MAX_SESSIONS
    kept = sessions[-MAX_SESSIONS:]
    return kept, kept[0]["end"] if more and kept else None


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a value can be a time; NaN and infinite values cannot."""
    return isinstance(value, int | float) and abs(value) < _LATEST


def _ended(record: dict[str, Any]) -> float | None:
    value = record.get("finalized_ts")
    return float(value) if _is_number(value) else None


def _is_session(record: dict[str, Any]) -> bool:
    """Whether a record has valid phases and times; damaged records are omitted."""
    phases = record.get("phases")
    return (
        _is_number(record.get("submit_ts"))
        and isinstance(phases, dict)
        and all(isinstance(spans, list) and all(map(_is_span, spans)) for spans in phases.values())
    )


def _is_span(span: Any) -> bool:
    return isinstance(span, dict) and _is_number(span.get("start_ts")) and _is_number(span.get("end_ts"))


def _session(record: dict[str, Any]) -> dict[str, Any]:
    phases = [
        {"name": name, "begin": span["start_ts"], "end": span["end_ts"]}
        for name, spans in record["phases"].items()
        for span in spans
    ]
    begin = record["submit_ts"]
    return {
        "task": record.get("task_id"),
        "session": record.get("session_id"),
        "role": f"{record.get('role', '')} {record.get('rank', 0)}",
        "begin": begin,
        "end": _ended(record) or max((span["end"] for span in phases), default=begin),
        "status": record.get("status"),
        "reason": record.get("reason"),
        "phases": phases,
    }


def _seconds(event: dict[str, Any]) -> float | None:
    """The end of a trace event, which is also when the event was written; None for other records."""
    begin, duration = event.get("ts"), event.get("dur", 0)
    if event.get("ph") not in ("X", "i") or not (_is_number(begin) and _is_number(duration)):
        return None
    return float(begin + duration) / 1e6


def _last_event(run: OpenedRun, files: list[Path]) -> float:
    ends = []
    for path in files:
        with run.open(path) as file:
            stop = file.seek(0, 2)
            records = json_records(lines_between(file, max(stop - 2**16, 0), stop)[1])
        ends += [seconds for record in records if (seconds := _seconds(record)) is not None]
    return max(ends, default=0.0)


def _phases(run: OpenedRun, files: list[Path], begin: float, end: float) -> Iterator[dict[str, Any]]:
    """The phases that overlap a window."""
    for path in files:
        with run.open(path) as file:
            start = position_of(file, begin, _seconds)
            lines = lines_between(file, start, start + _READ)[1]
        for event in json_records(lines):
            seconds = _seconds(event)
            if (
                event.get("ph") != "X"
                or seconds is None
                or event.get("name") in _NO_PHASES
                or event.get("cat") == "instr"
            ):
                continue
            if begin <= seconds and event["ts"] / 1e6 <= end:
                labels = event.get("args")
                args = labels if isinstance(labels, dict) else {}
                step = args.get("global_step")
                yield {
                    "name": event.get("name"),
                    "role": f"{args.get('role', '')} {args.get('rank', 0)}",
                    "begin": event["ts"] / 1e6,
                    "end": seconds,
                    "step": step if isinstance(step, int) else None,
                }


def _versions(run: OpenedRun, phases: list[dict[str, Any]], begin: float, end: float) -> list[dict[str, Any]]:
    """The time at which each weight version became available: the end of the weight update in the trace.

    Without a trace, this is the time at which the step's metrics were recorded, right after the update. The evaluation after
    the last update is skipped, because its step is that of the next update.
    """
    data = run.data()
    times, trained = data.metrics.times, completed_steps(data)
    records = zip(times.steps[:], times.values[:], strict=False)  # another thread may append
    recorded = {step + 1: time for step, time in records if step < trained}
    recorded |= {one["step"] + 1: one["end"] for one in phases if one["name"] == _UPDATE and one["step"] is not None}
    ordered = sorted(recorded.items(), key=lambda pair: pair[1])
    first = max(bisect_right([time for _, time in ordered], begin) - 1, 0)
    return [{"version": version, "time": time} for version, time in ordered[first:] if time <= end]
