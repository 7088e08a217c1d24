"""The values of ``--save-rollouts`` and ``rollout.save_rollouts``: the number of steps whose training rows are saved."""

import math

from areno.errors import UsageError

ALL = "all"
"""Value that keeps the rows of every step."""


def kept_rollouts(text: str | None) -> float:
    """Return the number of newest steps to keep; 0 for none, infinity for all. Raises UsageError."""
    if text is None:
        return 0
    if text == ALL:
        return math.inf
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{text!r} is neither a number of steps nor {ALL}; pass the number of newest steps whose rows to save, such as "
            f"20, {ALL} for every step, or 0 for none"
        )
    return int(text)
