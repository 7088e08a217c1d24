"""Lines of the ``.jsonl`` files of a run, where NaN and infinities are strings."""

import json
import math
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by the strings that stand for them."""
_STEPS = 2**63


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is incomplete or malformed, or has no ``step`` that fits into 64 bits."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and -_STEPS <= step < _STEPS else None


def as_float(value: Any) -> float:
    """Return a value of a record as a float; NaN if it is not a number, or is an integer above all floats."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
