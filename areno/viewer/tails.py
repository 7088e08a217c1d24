"""Parts of files that a run appends to: their last lines, and the lines around a time, without reading the rest."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_PROBE = 2**16


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_version(path: Path) -> tuple[int, int]:
    """Size of a file and time of its last change; zeros if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_size, stat.st_mtime_ns)


def lines_between(path: Path, start: int, stop: int) -> tuple[int, list[bytes]]:
    """The complete lines between two byte positions, and the position of the first; none if the file is missing."""
    try:
        with open(path, "rb") as file:
            if start > 0:
                file.seek(start - 1)
                start += len(file.readline(max(stop - start, 0) + 1)) - 1  # to the next line
            file.seek(start)
            content = file.read(max(stop - start, 0))
    except OSError:
        return start, []
    return start, content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def json_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines; malformed lines are skipped."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def stream_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, one at a time; none if the file is missing."""
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed below)
    except OSError:
        return
    with file:
        yield from json_records(line for line in file if line.endswith(b"\n"))


def last_records(path: Path, size: int) -> list[dict[str, Any]]:
    """The objects in the last ``size`` bytes of a JSON lines file."""
    stop = file_size(path)
    return list(json_records(lines_between(path, max(stop - size, 0), stop)[1]))


def position_of(path: Path, time: float, time_of: Callable[[dict[str, Any]], float | None]) -> int:
    """The byte position of the first record at or after ``time``, by bisection of a file whose records have rising times.

    ``time_of`` returns the time of a record, None if it has none. Where times fall a little, the position is off a little.
    """
    low, high = 0, file_size(path)
    while high - low > _PROBE:
        middle = (low + high) // 2
        _, lines = lines_between(path, middle, min(middle + _PROBE, high))
        times = (time_of(record) for record in json_records(lines))
        first = next((value for value in times if value is not None), None)
        low, high = (middle, high) if first is not None and first < time else (low, middle)
    start, lines = lines_between(path, low, file_size(path) if high <= low else high + _PROBE)
    for line in lines:
        value = next((time_of(record) for record in json_records([line])), None)
        if value is not None and value >= time:
            break
        start += len(line)
    return start
