"""The values of ``--save-rollouts`` and ``rollout.save_rollouts``: the number of steps whose training rows are saved."""

import math

from areno.errors import UsageError

ALL = "all"
"""Value of ``--save-rollouts`` that saves the rows of every step."""


def kept_rollouts(text: str | None) -> float:
    """Convert the value of ``--save-rollouts`` to a number N: the rows of the newest N steps are kept.

    N is 0 for None, and infinity for ``all``. Raises UsageError if ``text`` is invalid.
    """
    if text is None:
        return 0
    if text == ALL:
        return math.inf
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{text!r} is neither a number of steps nor {ALL}; pass {ALL} to save the rows of every step, 0 to save "
            "no rows, or a number such as 20 to save the rows of the newest 20 steps"
        )
    return int(text)
