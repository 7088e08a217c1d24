"""When an asynchronous run generated, rewarded and trained: sessions and phases, with the weight versions in between.

Sessions and phases exist in runs with traces (``perf_tracer`` of experiments, ``--trace``). The last ones before a time are
read, by bisection of the files, however long the run is.
"""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areno.viewer.catalog import OpenedRun
from areno.viewer.tails import file_size, json_records, lines_between, position_of

MAX_SESSIONS, MAX_SPANS = 400, 2000
_READ = 4 * 2**20
_UPDATE = "update_weights"
_NO_PHASES = ("step",)
"""Events that only contain others."""


def timeline(run: OpenedRun, until: float | None) -> dict[str, Any]:
    """The last sessions that ended before ``until`` (Unix seconds; None: of the run), and what the trainer did meanwhile.

    Returns:
        ``begin`` and ``end`` of the window; ``sessions`` by submission, each with ``task, session, role, begin, end, status,
        reason, phases`` (a list of ``name, begin, end``) and ``version``, that of the weights at its begin; ``phases`` of the
        trainer; ``versions`` (``version, time``) from the last one before the window on; ``earlier``: the ``until`` of the
        window before, null if there is none; ``traced``: whether the run has traces at all.
    """
    session_files, trace_files = run.traces("session_tracer"), run.traces("perf_tracer")
    sessions, earlier = _sessions(session_files, until)
    if sessions:
        begin, end = min(one["begin"] for one in sessions), max(one["end"] for one in sessions)
    else:
        end = until if until is not None else _last_event(trace_files)
        begin = end - 60
    phases = sorted(_phases(trace_files, begin, end), key=lambda span: float(span["begin"]))[:MAX_SPANS]
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


def _sessions(files: list[Path], until: float | None) -> tuple[list[dict[str, Any]], float | None]:
    """The last sessions that ended before a time, and the time to continue at."""
    sessions, more = [], False
    for path in files:
        stop = file_size(path) if until is None else position_of(path, until, lambda record: record.get("finalized_ts"))
        start, lines = lines_between(path, max(stop - _READ, 0), stop)
        more = more or start > 0
        sessions += [_session(record) for record in json_records(lines) if _is_session(record)]
    sessions = sorted(
        (one for one in sessions if until is None or one["end"] < until), key=lambda one: float(one["end"])
    )
    more = more or len(sessions) > MAX_SESSIONS
    kept = sessions[-MAX_SESSIONS:]
    return kept, kept[0]["end"] if more and kept else None


def _is_session(record: dict[str, Any]) -> bool:
    return isinstance(record.get("submit_ts"), float) and isinstance(record.get("phases"), dict)


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
        "end": record.get("finalized_ts") or max((span["end"] for span in phases), default=begin),
        "status": record.get("status"),
        "reason": record.get("reason"),
        "phases": phases,
    }


def _seconds(event: dict[str, Any]) -> float | None:
    """When an event of a trace was written: its end."""
    return (event["ts"] + event.get("dur", 0)) / 1e6 if event.get("ph") in ("X", "i") else None


def _last_event(files: list[Path]) -> float:
    ends = []
    for path in files:
        stop = file_size(path)
        records = json_records(lines_between(path, max(stop - 2**16, 0), stop)[1])
        ends += [seconds for record in records if (seconds := _seconds(record)) is not None]
    return max(ends, default=0.0)


def _phases(files: list[Path], begin: float, end: float) -> Iterator[dict[str, Any]]:
    """The phases that end in a window."""
    for path in files:
        start = position_of(path, begin, _seconds)
        for event in json_records(lines_between(path, start, start + _READ)[1]):
            seconds = _seconds(event)
            if (
                event.get("ph") != "X"
                or seconds is None
                or event.get("name") in _NO_PHASES
                or event.get("cat") == "instr"
            ):
                continue
            if begin <= seconds and event["ts"] / 1e6 <= end:
                args = event.get("args") or {}
                yield {
                    "name": event.get("name"),
                    "role": f"{args.get('role', '')} {args.get('rank', 0)}",
                    "begin": event["ts"] / 1e6,
                    "end": seconds,
                    "step": args.get("global_step"),
                }


def _versions(run: OpenedRun, phases: list[dict[str, Any]], begin: float, end: float) -> list[dict[str, Any]]:
    """When weights became available; a step's metrics are recorded right after its update, and replace a missing trace."""
    times = run.data().metrics.times
    count = len(times.values)
    recorded = {step + 1: time for step, time in zip(times.steps[:count], times.values[:count], strict=True)}
    recorded |= {one["step"] + 1: one["end"] for one in phases if one["name"] == _UPDATE and one["step"] is not None}
    ordered = sorted(recorded.items(), key=lambda pair: pair[1])
    first = max(bisect_right([time for _, time in ordered], begin) - 1, 0)
    return [{"version": version, "time": time} for version, time in ordered[first:] if time <= end]
