"""Plots the sessions of a run as an HTML page.

Each session has a line, which shows the session's phases. A table summarizes the durations of the phases.

    python -m areno.tools.plot_session_trace LOGS_OR_FILE... out.html

Each input is a ``.jsonl`` file or a folder. Folders are searched for ``sessions-r*.jsonl``. The page is self-contained.
Malformed lines are skipped and counted.
"""

import html
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from areno.errors import UsageError
from areno.tools.inputs import json_lines, run_tool, trace_files, write_output

_USAGE = "usage: python -m areno.tools.plot_session_trace LOGS_OR_FILE... out.html"
_WIDTH, _ROW = 1200, 9
_MAX_ROWS = 2000
_COLORS = {"generate": "#4477aa", "reward": "#ccbb44", "toolcall": "#228833"}
_OTHER = "#aa3377"
_LIFE = {"accepted": "#dddddd", "pending": "#eeeeee", "rejected": "#f3d9b1", "failed": "#f2b8b5", "dropped": "#e3d4f0"}
_HEAD = """<!doctype html><meta charset="utf-8"><title>Sessions</title>
<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}svg text{font-size:11px}</style>
"""


def read_sessions(inputs: Sequence[str | Path]) -> tuple[list[dict[str, Any]], int]:
    """Return the sessions in order of submission, and the number of skipped lines.

    Raises UsageError if there are no sessions.
    """
    records = [record for path in trace_files(inputs, "sessions-r*.jsonl") for record in json_lines(path)]
    sessions = [record for record in records if record is not None and _is_session(record)]
    if not sessions:
        raise UsageError(f"{', '.join(map(str, inputs))}: the run has not recorded a session yet; try again later")
    return sorted(sessions, key=lambda record: record["submit_ts"]), len(records) - len(sessions)


def _is_session(record: dict[str, Any]) -> bool:
    """Whether a record can be drawn. Records of other programs or other versions of areno may lack required fields."""
    try:
        render([record])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return True


def render(sessions: Sequence[dict[str, Any]]) -> str:
    """Render the HTML page of one or more records of ``sessions-r*.jsonl``."""
    shown = sessions[:_MAX_ROWS]
    counts = Counter(record["status"] for record in sessions)
    title = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    more = f"<p>Showing the first {_MAX_ROWS}.</p>" if len(shown) < len(sessions) else ""
    return f"{_HEAD}<h1>{len(sessions)} sessions: {title}</h1>{_table(sessions)}{_legend()}{more}{_drawing(shown)}\n"


def _table(sessions: Sequence[dict[str, Any]]) -> str:
    rows = []
    for name in ("total", *_COLORS):
        seconds = sorted(record[f"{name}_s"] for record in sessions if record.get(f"{name}_s") is not None)
        if seconds:
            p99 = seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]
            cells = "".join(f"<td>{value:.3f}</td>" for value in (mean(seconds), median(seconds), p99, seconds[-1]))
            rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    head = "<tr><th>seconds</th><th>mean</th><th>median</th><th>99 %</th><th>longest</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _legend() -> str:
    colors = {**_COLORS, "other phases": _OTHER, **{f"waiting, {name}": color for name, color in _LIFE.items()}}
    return "<p>" + " ".join(f'<span style="background:{c}">&emsp;</span> {name}' for name, c in colors.items()) + "</p>"


def _drawing(sessions: Sequence[dict[str, Any]]) -> str:
    begin = min(record["submit_ts"] for record in sessions)
    end = max(max(_ends(record)) for record in sessions)
    scale = _WIDTH / max(end - begin, 1e-9)
    bars = [
        bar
        for row, record in enumerate(sessions)
        for bar in _bars(record, row * _ROW + 20, lambda ts: (ts - begin) * scale)
    ]
    height = len(sessions) * _ROW + 24
    axis = "".join(
        f'<text x="{_WIDTH * tenth / 10:.1f}" y="12">{(end - begin) * tenth / 10:.2f} s</text>' for tenth in range(10)
    )
    return f'<svg width="{_WIDTH + 60}" height="{height}">{axis}{"".join(bars)}</svg>'


def _ends(record: dict[str, Any]) -> list[float]:
    spans = [span["end_ts"] for spans in record["phases"].values() for span in spans]
    return [record["submit_ts"], *spans, *([record["finalized_ts"]] if record["finalized_ts"] else [])]


def _bars(record: dict[str, Any], y: int, x: Any) -> Iterator[str]:
    label = f"task {record['task_id']}, session {record['session_id']}, {record['status']}"
    label += f", {record['reason']}" if record.get("reason") else ""
    color = _LIFE.get(record["status"], "#dddddd")
    yield _bar(x(record["submit_ts"]), x(max(_ends(record))), y, color, label)
    for phase, spans in record["phases"].items():
        for span in spans:
            seconds = span["end_ts"] - span["start_ts"]
            text = f"{label}: {phase} {seconds:.3f} s"
            yield _bar(x(span["start_ts"]), x(span["end_ts"]), y, _COLORS.get(phase, _OTHER), text)


def _bar(left: float, right: float, y: int, color: str, label: str) -> str:
    width = max(right - left, 0.5)
    attributes = f'x="{left:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 2}" fill="{color}"'
    return f"<rect {attributes}><title>{html.escape(label)}</title></rect>"


def _work(inputs: Sequence[str], output: str) -> str:
    sessions, skipped = read_sessions(inputs)
    write_output(output, render(sessions))
    return f"{len(sessions)} sessions in {output}" + (f", {skipped} malformed lines skipped" if skipped else "")


if __name__ == "__main__":
    sys.exit(run_tool(sys.argv[1:], _USAGE, _work))
