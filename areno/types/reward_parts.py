"""Rewards in named parts: their weighted sum, and how both travel as one number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from areno.config.reward_weights import part_weights

PARTS = "reward_parts/"
"""What the names of parts begin with among metrics and in trajectories."""

PartValues = float | dict[str, float]
"""What a reward function returned, checked: a finite number, or such numbers by the names of parts."""


class WeightedReward(float):
    """A reward in named ``parts``, as the function returned them; as a number their weighted sum.

    A multiple of it has multiples of the parts. All other arithmetic gives plain numbers.
    """

    parts: Mapping[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float] | None = None) -> WeightedReward:  # noqa: D102
        made = super().__new__(cls, total)
        made.parts = parts or {}
        return made

    def __mul__(self, factor: float) -> WeightedReward:
        return WeightedReward(float(self) * factor, {name: part * factor for name, part in self.parts.items()})


def parts_of(reward: float | None) -> Mapping[str, float]:
    """The parts of a reward by name; empty for a plain number."""
    return reward.parts if isinstance(reward, WeightedReward) else {}


def part_columns(rewards: Sequence[float], prefix: str = "") -> dict[str, list[float]]:
    """The parts that all of some rewards have, each as a list in their order; ``prefix`` begins the names."""
    rows = [parts_of(reward) for reward in rewards]
    shared = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    return {prefix + name: [row[name] for row in rows] for name in shared}


class RewardParts:
    """The weighted sums of one reward function's parts, with ``weights`` as for :func:`part_weights`, 1 where not named.

    Every record must have all the parts that any record had, and all that have a weight: a part that some records lack has no
    mean to be compared with, and a weight without a part is a wrong name.
    """

    def __init__(self, weights: str | Mapping[str, float] | None = None) -> None:
        self._weights = part_weights(weights)
        self._names = dict.fromkeys(self._weights)  # rebound and never changed: threads read it

    def weigh(self, value: PartValues) -> float:
        """The reward of a record, with its parts if it has any."""
        if not isinstance(value, dict):
            return value
        self._names = self._names | dict.fromkeys(value)
        return WeightedReward(sum(self._weights.get(name, 1.0) * part for name, part in value.items()), value)

    def problem(self, reward: float) -> str | None:
        """What is wrong with a reward beside all those that were weighed."""
        parts = parts_of(reward)
        if missing := [name for name in self._names if name not in parts]:
            return (
                f"returned {', '.join(parts) or 'one number'}, without {', '.join(missing)}, which --reward-weights "
                "(reward.weights) names or other records have; return every part for every record, 0 where it does not apply"
            )
        return None if math.isfinite(reward) else f"the weighted sum of its parts {dict(parts)} is {reward:g}"
