"""What the tools share: finding the files of a run's tracers, reading lines that may be torn, and ending with an exit code."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, UsageError


def trace_files(inputs: Sequence[str | Path], pattern: str) -> list[Path]:
    """The given files, and those below given folders whose names fit; a `UsageError` where there are none."""
    files: list[Path] = []
    for given in inputs:
        path = Path(given)
        found = sorted(path.rglob(pattern)) if path.is_dir() else [path] if path.is_file() else []
        if not found:
            raise UsageError(f"{given}: there is no {pattern}; give such a file, or a folder that holds some")
        files += found
    return files


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a ``.jsonl`` file; None for a line that is none, as a kill leaves behind."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) else None


def run_tool(argv: Sequence[str], usage: str, work: Callable[[Sequence[str], str], str]) -> int:
    """Give inputs and the output, which is the last argument, to ``work``, print what it says, and return the exit code."""
    if argv[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if len(argv) < 2:
        print(usage, file=sys.stderr)
        return 2
    try:
        print(work(argv[:-1], argv[-1]))
    except ArenoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write_output(output: str | Path, text: str) -> None:
    """Write the result; a `UsageError` if the file cannot be written."""
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror or error}; choose another output file"
        ) from error
