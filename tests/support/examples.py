"""How many examples a property is tried with."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("ARENO_THOROUGH_TESTS"))
"""Set by ``make test-all``."""


def examples(number: int) -> int:
    """All of them where everything is tested; a quarter on every change."""
    return number if THOROUGH else -(-number // 4)
