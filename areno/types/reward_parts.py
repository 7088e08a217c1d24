"""Rewards with named parts, and the weighted sum of the parts."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

from areno.config.reward_weights import part_weights

PARTS = "reward_parts/"
"""Prefix of part names in metrics and trajectories."""

PartValues = float | dict[str, float]
"""Checked result of a reward function: one finite number, or a dict from the name of each reward part to a finite number."""


class WeightedReward(float):
    """A reward with named, unweighted ``parts``. The value of the reward is the weighted sum of the parts.

    ``reward * factor`` also scales the parts. All other arithmetic returns plain numbers.
    """

    parts: Mapping[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float] | None = None) -> WeightedReward:  # noqa: D102
        reward = super().__new__(cls, total)
        reward.parts = parts or {}
        return reward

    def __mul__(self, factor: float) -> WeightedReward:
        return WeightedReward(float(self) * factor, {name: part * factor for name, part in self.parts.items()})


def parts_of(reward: float | None) -> Mapping[str, float]:
    """Return the parts of a reward by name; empty for a plain number."""
    return reward.parts if isinstance(reward, WeightedReward) else {}


def part_columns(rewards: Sequence[float], prefix: str = "") -> dict[str, list[float]]:
    """Return the values of each reward part, by name. A part is omitted if any reward lacks it.

    ``prefix`` is prepended to the names of the parts.
    """
    rows = [parts_of(reward) for reward in rewards]
    shared = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    return {prefix + name: [row[name] for row in rows] for name in shared}


class RewardParts:
    """Computes weighted sums of reward parts.

    :func:`part_weights` documents the format of ``weights``. A part without a weight has weight 1. All records must have the
    same parts, because a part that some records lack cannot be averaged. A weight for a part that the records lack is an error,
    because the name is probably misspelled.
    """

    def __init__(self, weights: str | Mapping[str, float] | None = None) -> None:
        self._weights = part_weights(weights)
        self._names = dict.fromkeys(self._weights)  # replaced, never modified, because other threads iterate over it
        self._lock = threading.Lock()

    def weigh(self, value: PartValues) -> float:
        """Convert ``value``, the result of a reward function, to a reward.

        If ``value`` is a number, the number is the reward. If ``value`` has parts, the reward is their weighted sum.
        """
        if not isinstance(value, dict):
            return value
        with self._lock:
            self._names = self._names | dict.fromkeys(value)
        return WeightedReward(sum(self._weights.get(name, 1.0) * part for name, part in value.items()), value)

    def problem(self, reward: float) -> str | None:
        """Return an error message for a reward; None if the reward is valid.

        A valid reward is finite. It has all parts for which a weight is set, and all parts that earlier rewards had.
        """
        parts = parts_of(reward)
        if missing := [name for name in self._names if name not in parts]:
            return (
                f"returned {', '.join(parts) or 'one number'}, but not {', '.join(missing)}; return the same parts for every "
                "record, including all parts in --reward-weights (reward.weights); use 0 for a part that does not apply"
            )
        return (
            None
            if math.isfinite(reward)
            else f"returned {dict(parts)}, and the weighted sum of these parts is {reward:g}"
        )
