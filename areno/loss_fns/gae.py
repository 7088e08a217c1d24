"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) and advantage whitening.

All computations are in float64, because an advantage may be a sum over thousands of later tokens.
"""

import math
from collections.abc import Sequence

from areno.types import TrainSequence

# Division by a smaller deviation would only amplify rounding errors.
MIN_DEVIATION = 1e-6


def compute_gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float, next_value: float = 0.0
) -> tuple[list[float], list[float]]:
    """Compute A_t = d_t + gamma lam A_{t+1}, with d_t = r_t + gamma V_{t+1} - V_t, over the T tokens of one response.

    Args:
        rewards: reward of each response token [T].
        values: value before each response token [T].
        gamma: discount of later rewards, 0 to 1.
        lam: GAE lambda, 0 to 1. With 0, A_t is d_t. With 1, A_t is the discounted return minus V_t.
        next_value: value after the last token; 0 for a finished response.

    Returns:
        Advantages [T] and returns A + V [T].

    Raises:
        ValueError: lengths differ, gamma or lam is outside 0 to 1, or a number is not finite.
    """
    if len(rewards) != len(values):
        raise ValueError(f"GAE needs one value per reward, but got {len(rewards)} rewards and {len(values)} values")
    for name, constant in (("gamma", gamma), ("lam", lam)):
        if not 0 <= constant <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {constant}")
    for name, numbers in (("rewards", rewards), ("values", values), ("next_value", [next_value])):
        if not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"GAE needs finite {name}, but not all numbers are finite; check the model or function that computes {name}"
            )
    advantages = [0.0] * len(rewards)
    later = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
        advantages[t], next_value = later, values[t]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute the discounted return of each step i, such as a token or a turn: R_i = r_i + discount * R_{i+1}."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def fill_gae(
    row: TrainSequence,
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float,
    lam: float,
    bootstrap: bool,
) -> None:
    """Set ``values``, ``returns`` and ``advantages`` of a row for the trained tokens; 0 for all other tokens.

    GAE skips untrained tokens: gamma and lam apply from one trained token to the next.

    Args:
        row: changed in place.
        rewards: reward of each trained token, in order.
        values: value after each token of the row. The value before a trained token i, ``values[i - 1]``, becomes
            ``row.values[i]``. The first token of a row is never trained.
        bootstrap: whether the value after the last trained token comes from ``values``, as is usual for a truncated
            response. If False, this value is 0.
    """
    actions = [index for index, trained in enumerate(row.trainable()) if trained]
    old = [values[index - 1] for index in actions]
    following = values[actions[-1]] if bootstrap and actions else 0.0
    advantages, returns = compute_gae(rewards, old, gamma=gamma, lam=lam, next_value=following)
    row.values, row.returns, row.advantages = ([0.0] * len(row.tokens) for _ in range(3))
    for index, *numbers in zip(actions, old, returns, advantages, strict=True):
        row.values[index], row.returns[index], row.advantages[index] = numbers


def whiten(rows: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    """Standardize numbers over all tokens under ``masks``: (x - mean) / std, with the population std.

    If the std is at most 1e-6, only the mean is subtracted. Equal numbers become exactly 0.

    Args:
        rows: for each sequence, a list with one number per token.
        masks: lists as long as those in ``rows``, with True for the tokens to standardize.

    Returns:
        Lists as long as those in ``rows``, with 0 for tokens outside the masks.

    Raises:
        ValueError: a row and its mask differ in length.
    """
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise ValueError(
            f"whiten needs one mask entry per token, but the rows have lengths {[len(row) for row in rows]} "
            f"and the masks have lengths {[len(mask) for mask in masks]}"
        )
    values = [x for row, mask in zip(rows, masks, strict=True) for x, keep in zip(row, mask, strict=True) if keep]
    if values and min(values) == max(values):
        mean, deviation = values[0], 0.0
    else:
        mean = math.fsum(values) / max(len(values), 1)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(len(values), 1))
    scale = deviation if deviation > MIN_DEVIATION else 1.0
    return [
        [(x - mean) / scale if keep else 0.0 for x, keep in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]
