"""Lines of the ``.jsonl`` files of a run, where NaN and infinities are strings."""

import json
import math
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by the strings that stand for them."""


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is incomplete, malformed, or has no integer ``step``."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def as_float(value: Any) -> float:
    """A number of a record; NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
