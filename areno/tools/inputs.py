"""What the tools share: finding the files of a run's tracers, reading lines that may be torn, and ending with an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, UsageError


def trace_files(inputs: Sequence[str | Path], pattern: str) -> list[Path]:
    """The given files, and those below given folders whose names fit.

    Raises:
        UsageError: an input does not exist, or holds none.
    """
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
    """Run a tool whose last argument is the file to write.

    Args:
        argv: arguments of the command line.
        usage: shown where there are too few.
        work: given inputs and output, does the work and says what it did.

    Returns:
        The exit code.
    """
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
    """Write the result.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror or error}; choose another output file"
        ) from error
