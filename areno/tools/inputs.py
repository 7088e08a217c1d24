"""Code shared by the tools: trace files, JSON lines, and the command line."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, UsageError


def trace_files(inputs: Sequence[str | Path], pattern: str) -> list[Path]:
    """Return the input files and the matching files in input folders. Raises UsageError if an input has no matching file."""
    files: list[Path] = []
    for path in map(Path, inputs):
        matches = sorted(path.rglob(pattern)) if path.is_dir() else [path] if path.is_file() else []
        if not matches:
            raise UsageError(f"{path}: found no {pattern}; pass such a file, or a folder that contains such files")
        files += matches
    return files


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line of a ``.jsonl`` file. A malformed line, such as an incomplete last line, yields None."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # RecursionError: nested too deeply
                record = None
            yield record if isinstance(record, dict) else None


def run_tool(argv: Sequence[str], usage: str, work: Callable[[Sequence[str], str], str]) -> int:
    """Call ``work(inputs, output)`` with the paths in ``argv``, print the result, and return the exit code of the tool."""
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
    """Write ``text`` to a file. Raises UsageError if the file cannot be written."""
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror or error}; choose another output file"
        ) from error
