"""Reads the timeline of an asynchronous run: rollout sessions, phases and weight versions over time.

A rollout session describes a rollout from its submission to its outcome (see :mod:`areno.observability.session_tracer`).
Sessions are recorded with ``perf_tracer.session_tracer``. Phases are recorded with ``--trace`` or with an experiment's
``perf_tracer``. :func:`timeline` returns a time window of the timeline. A binary search finds the window in the files, so the
rest of a long run is not read.
"""

from bisect import bisect_right
from pathlib import Path
from typing import Any, TypeGuard

from areno.viewer.catalog import OpenedRun, completed_steps
from areno.viewer.tails import json_records, lines_between, position_of

MAX_SESSIONS, MAX_SPANS = 400, 2000
_READ = 4 * 2**20
_LATEST = 1e18
_UPDATE = "update_weights"
_NO_PHASES = ("step",)
"""Names of trace events that are not phases, because they only enclose other events."""


def timeline(run: OpenedRun, until: float | None) -> dict[str, Any]:
    """Return the sessions and phases in a time window before ``until``.

    The window has up to ``MAX_SESSIONS`` sessions: those that ended last before ``until``. If ``until`` is None, the window is
    at the end of the run. ``until`` and all times are in Unix seconds.

    Returns:
        - ``begin`` and ``end`` of the window, which spans the sessions. Without sessions, the window spans the phases of the
          last minute.
        - ``sessions`` in order of submission. Each has ``task, session, role, begin, end, status, reason``, ``phases`` (a
          list of ``name, begin, end``), and ``version`` (the weight version when the session began).
        - ``phases`` of the trainer, in the order in which they began
        - ``left_out``: whether ``phases`` omits the first phases of the window, because the window has too many phases
        - ``versions`` (``version, time``), starting with the last version before the window
        - ``earlier``: the value of ``until`` for the previous window; null if there is no previous window
        - ``traced``: whether the run has traces
    """
    session_files, trace_files = run.traces("session_tracer"), run.traces("perf_tracer")
    sessions, earlier = _sessions(run, session_files, until)
    if sessions:
        begin, end = min(one["begin"] for one in sessions), max(one["end"] for one in sessions)
    else:
        end = _last_phase(run, trace_files, until) or until or 0.0
        begin = end - 60
    phases, left_out = _phases(run, trace_files, begin, end)
    versions = _versions(run, phases, begin, end)
    times = [one["time"] for one in versions]
    for session in sessions:
        place = bisect_right(times, session["begin"]) - 1
        session["version"] = versions[place]["version"] if place >= 0 else 0
    if not sessions and phases:
        earlier = min(phases[0]["end"], end) if left_out else begin
        earlier = earlier if _last_phase(run, trace_files, earlier) is not None else None
        begin, left_out = min(one["begin"] for one in phases), False
    return {
        "begin": begin,
        "end": end,
        "sessions": sorted(sessions, key=lambda one: float(one["begin"])),
        "phases": sorted(phases, key=lambda one: float(one["begin"])),
        "left_out": left_out,
        "versions": versions,
        "earlier": earlier,
        "traced": bool(session_files or trace_files),
    }


def _sessions(run: OpenedRun, files: list[Path], until: float | None) -> tuple[list[dict[str, Any]], float | None]:
    """Return up to ``MAX_SESSIONS`` rollout sessions: those that ended last before ``until``.

    Also return the value of ``until`` for the next call, which returns earlier sessions. This value is None if there are no
    earlier sessions.
    """
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
    """Whether a value is a finite number whose absolute value is below ``_LATEST``. Larger numbers cannot be times."""
    return isinstance(value, int | float) and abs(value) < _LATEST


def _ended(record: dict[str, Any]) -> float | None:
    value = record.get("finalized_ts")
    return float(value) if _is_number(value) else None


def _is_session(record: dict[str, Any]) -> bool:
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
    """Return the time in seconds at which a trace event ended; None if ``event`` is not a trace event with valid times."""
    begin, duration = event.get("ts"), event.get("dur", 0)
    if event.get("ph") not in ("X", "i") or not (_is_number(begin) and _is_number(duration)):
        return None
    return float(begin + duration) / 1e6


def _is_phase(event: dict[str, Any]) -> bool:
    drawn = event.get("ph") == "X" and event.get("name") not in _NO_PHASES and event.get("cat") != "instr"
    return drawn and _seconds(event) is not None


def _last_phase(run: OpenedRun, files: list[Path], until: float | None) -> float | None:
    """Return the time at which the last phase before ``until`` ended; None if no phase ended before ``until``."""
    ends = []
    for path in files:
        with run.open(path) as file:
            stop = file.seek(0, 2) if until is None else position_of(file, until, _seconds)
            for size in (2**16, _READ):
                events = json_records(lines_between(file, max(stop - size, 0), stop)[1])
                earlier = [end for event in events if _is_phase(event) and (end := _seconds(event)) is not None]
                earlier = [end for end in earlier if until is None or end < until]
                if earlier:
                    break
        ends += earlier
    return max(ends, default=None)


def _phases(run: OpenedRun, files: list[Path], begin: float, end: float) -> tuple[list[dict[str, Any]], bool]:
    """Return the phases that overlap a time window, in order of their ends, and whether some of these phases are omitted.

    If there are too many phases (see ``MAX_SPANS``), the phases that ended first are omitted.
    """
    phases, more = [], False
    for path in files:
        with run.open(path) as file:
            first, last = position_of(file, begin, _seconds), position_of(file, end, _seconds)
            start = max(first, last - _READ)
            lines = lines_between(file, start, last + _READ)[1]  # phases that end later may begin in the window
        more = more or start > first
        phases += [_phase(event) for event in json_records(lines) if _is_phase(event)]
    phases = [one for one in phases if begin <= one["end"] and one["begin"] <= end]
    phases.sort(key=lambda one: float(one["end"]))
    return phases[-MAX_SPANS:], more or len(phases) > MAX_SPANS


def _phase(event: dict[str, Any]) -> dict[str, Any]:
    labels = event.get("args")
    args = labels if isinstance(labels, dict) else {}
    step = args.get("global_step")
    return {
        "name": event.get("name"),
        "role": f"{args.get('role', '')} {args.get('rank', 0)}",
        "begin": event["ts"] / 1e6,
        "end": _seconds(event),
        "step": step if isinstance(step, int) else None,
    }


def _versions(run: OpenedRun, phases: list[dict[str, Any]], begin: float, end: float) -> list[dict[str, Any]]:
    """Return the time at which each weight version became available.

    With a trace, this time is the end of the weight update. Without a trace, this time is when the step's metrics were
    recorded, right after the update. Records of steps that are not completed are ignored. They contain only an
    evaluation, which is recorded under the number of the next training step.
    """
    data = run.data()
    times, trained = data.metrics.times, completed_steps(data)
    records = zip(times.steps[:], times.values[:], strict=False)  # another thread may append
    recorded = {step + 1: time for step, time in records if step < trained}
    recorded |= {one["step"] + 1: one["end"] for one in phases if one["name"] == _UPDATE and one["step"] is not None}
    ordered = sorted(recorded.items(), key=lambda pair: pair[1])
    first = max(bisect_right([time for _, time in ordered], begin) - 1, 0)
    return [{"version": version, "time": time} for version, time in ordered[first:] if time <= end]
