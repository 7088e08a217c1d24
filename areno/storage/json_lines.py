"""Reads the ``.jsonl`` files of a run, in which NaN and infinities are strings."""

import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Maps each string that represents NaN or an infinity in a file to the corresponding float.

The files contain strings in place of these numbers, because JSON cannot express them.
"""
MAX_BYTES = 2**24
"""Maximum size in bytes of a ``.jsonl`` line or a ``.json`` file, so that a large file cannot exhaust memory."""
_STEPS = 2**63


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is incomplete or malformed, or its ``step`` is not a 64-bit integer."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and -_STEPS <= step < _STEPS else None


def records(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the size in bytes and the record of each complete line after the current position of a file.

    The record is None if :func:`parse_record` returns None, or if the line has more than ``MAX_BYTES`` bytes.
    """
    while line := file.readline(MAX_BYTES):
        length, piece = len(line), line
        while not piece.endswith(b"\n"):
            if not (piece := file.readline(MAX_BYTES)):
                return
            length += len(piece)
        yield length, parse_record(line)


def as_float(value: Any) -> float:
    """Return a value of a record as a float; NaN if the value is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
