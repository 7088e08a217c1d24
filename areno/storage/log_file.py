"""Reads sections of a log without reading the rest of the file."""

from dataclasses import dataclass
from typing import BinaryIO

PART_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class LogPart:
    """A section of a log: complete lines, the byte positions of their start and end, and the size of the file in bytes.

    A line of more than ``PART_BYTES`` bytes is split across several sections.
    """

    lines: list[str]
    start: int
    end: int
    size: int


def log_part(file: BinaryIO, after: int | None = None, before: int | None = None) -> LogPart:
    """Return a section of a log. A section has at most ``PART_BYTES`` bytes.

    The section starts at byte ``after`` or ends at byte ``before``. By default, the section is the end of the log.
    """
    size = file.seek(0, 2)
    is_forward = after is not None and 0 <= after <= size
    if is_forward:
        start, stop = after or 0, min((after or 0) + PART_BYTES, size)
    else:
        stop = size if before is None else min(max(before, 0), size)
        start = max(stop - PART_BYTES, 0)
    file.seek(start)
    content = file.read(stop - start)
    if start and not is_forward and (cut := content.find(b"\n") + 1) < len(content):  # begins in the middle of a line
        start, content = start + cut, content[cut:]
    complete = content[: content.rfind(b"\n") + 1]
    if (is_forward or before is None) and (complete or len(content) < PART_BYTES):
        content = complete
    lines = content.decode("utf-8", errors="replace").splitlines()
    return LogPart(lines, start, start + len(content), size)
