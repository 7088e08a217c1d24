"""Weights of the parts of a reward: ``--reward-weights format=0.2,answer=1`` and ``reward.weights``."""

import math
import re
from collections.abc import Mapping
from typing import Any

from areno.errors import UsageError

PART_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
"""Regular expression for the names of reward parts. Such names need no quotes in metrics, options and YAML."""


def part_weights(weights: str | Mapping[Any, Any] | None) -> dict[str, float]:
    """Parse weights from ``name=number,name=number`` or a mapping. Raises UsageError if a name or a weight is invalid."""
    entries = weights.split(",") if isinstance(weights, str) else [f"{name}={w}" for name, w in (weights or {}).items()]
    checked: dict[str, float] = {}
    for entry in entries:
        name, _, number = (text.strip() for text in entry.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not PART_NAME.fullmatch(name) or name in checked or not 0 <= weight < math.inf:
            raise UsageError(
                f"{entry!r} is not a valid weight; write each reward part's name once, with a finite number of at least "
                "0, as in format=0.2,answer=1. A name has letters, digits, `_`, `.` and `-`, and starts with a letter or `_`. "
                "For a penalty, let the reward function return a negative value for the part"
            )
        checked[name] = weight
    return checked
