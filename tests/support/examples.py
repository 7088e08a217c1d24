"""How many examples a property is tested with, and which cases run on every change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("ARENO_THOROUGH_TESTS"))
"""Set by ``make test-all``."""


def examples(number: int) -> int:
    """The number itself in thorough runs, a quarter of it on every change."""
    return number if THOROUGH else -(-number // 4)


def some_quick(values: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of which only the ``quick`` ones run on every change; the others are marked ``long``."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]
