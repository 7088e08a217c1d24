"""Merges the traces of all roles and ranks into one Chrome trace, for https://ui.perfetto.dev and ``chrome://tracing``.

    python -m areno.tools.perf_trace_converter LOGS_OR_FILE... out.json

Each input is a ``.jsonl`` file or a folder. Folders are searched for ``traces-r*.jsonl``. The process ids of two machines may
be equal, so processes are renumbered. Malformed lines are skipped and counted.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno.tools.inputs import json_lines, run_tool, trace_files, write_output

_USAGE = "usage: python -m areno.tools.perf_trace_converter LOGS_OR_FILE... out.json"


def convert(inputs: Sequence[str | Path], output: str | Path) -> tuple[int, int]:
    """Write one Chrome trace from files or folders. Return the number of written events and of skipped lines."""
    events: list[dict[str, Any]] = []
    skipped = 0
    numbers: dict[tuple[Path, Any], int] = {}
    for path in trace_files(inputs, "traces-r*.jsonl"):
        for event in json_lines(path):
            if event is None or not _is_event(event):
                skipped += 1
                continue
            event["pid"] = numbers.setdefault((path, event.get("pid")), len(numbers) + 1)
            events.append(event)
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    write_output(output, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events), skipped


def _is_event(event: dict[str, Any]) -> bool:
    known = "name" in event and isinstance(event.get("ph"), str) and isinstance(event.get("ts"), int | float)
    return known and isinstance(event.get("pid"), int | str | None)


def _work(inputs: Sequence[str], output: str) -> str:
    written, skipped = convert(inputs, output)
    return f"{written} events in {output}" + (f", {skipped} malformed lines skipped" if skipped else "")


if __name__ == "__main__":
    sys.exit(run_tool(sys.argv[1:], _USAGE, _work))
