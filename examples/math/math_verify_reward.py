"""Reward of 1.0 for a completion whose result equals the row's result, otherwise 0.0. Needs ``pip install ".[math]"``."""

from __future__ import annotations

from areno.rewards.math import math_verify_reward
from areno.types import RewardRecord


def reward_fn(record: RewardRecord) -> float:
    """Compare the boxed result of ``record.completion`` with ``record.answer``, the row's ``solutions``.

    Raises:
        KeyError: the row has no reference answer.
    """
    if record.answer is None:
        raise KeyError("the row has neither `solutions` nor `answer`; use examples/math/dataset_loader.py")
    return math_verify_reward(record.completion, record.answer)
