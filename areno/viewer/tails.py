"""Reads parts of files to which a run appends: the last lines, or the lines around a time."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_PROBE = 2**16


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file does not exist or is inaccessible."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_version(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and the time of its last change in ns; zeros if the file is inaccessible."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_size, stat.st_mtime_ns)


def lines_between(file: BinaryIO, start: int, stop: int) -> tuple[int, list[bytes]]:
    """Return the complete lines between two byte positions of a file, and the position of the first of these lines."""
    if start > 0:
        file.seek(start - 1)
        start += len(file.readline(max(stop - start, 0) + 1)) - 1  # to the next line
    file.seek(start)
    content = file.read(max(stop - start, 0))
    return start, content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def json_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Parse each line as JSON, and yield the JSON objects. Malformed lines and other JSON values are skipped."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def position_of(file: BinaryIO, time: float, time_of: Callable[[dict[str, Any]], float | None]) -> int:
    """Return the byte position of the first record at or after ``time``. The file is bisected, so its times must increase.

    ``time_of`` returns the time of a record; None for a record without a time. If records are slightly out of order, the
    position is slightly wrong.
    """
    size = file.seek(0, 2)
    low, high = 0, size
    while high - low > _PROBE:
        middle = (low + high) // 2
        _, lines = lines_between(file, middle, min(middle + _PROBE, high))
        times = (time_of(record) for record in json_records(lines))
        first = next((value for value in times if value is not None), None)
        low, high = (middle, high) if first is not None and first < time else (low, middle)
    start, lines = lines_between(file, low, size if high <= low else high + _PROBE)
    for line in lines:
        value = next((time_of(record) for record in json_records([line])), None)
        if value is not None and value >= time:
            break
        start += len(line)
    return start
