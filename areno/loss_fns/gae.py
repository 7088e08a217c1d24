"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438), and standardising what it gives.

Plain Python floats, hence float64: a response has thousands of tokens, and each advantage sums over all later ones.
"""

import math
from collections.abc import Sequence

from areno.types import TrainSequence

# At or below this deviation, dividing by it would only enlarge rounding.
MIN_DEVIATION = 1e-6


def compute_gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float, next_value: float = 0.0
) -> tuple[list[float], list[float]]:
    """A_t = d_t + gamma lam A_{t+1}, with d_t = r_t + gamma V_{t+1} - V_t, over the T tokens of one response.

    Args:
        rewards: reward of each response token [T].
        values: value before each response token [T].
        gamma: discount of later rewards, 0 to 1.
        lam: 0 trusts the values most, 1 the rewards most.
        next_value: value after the last token; 0 for a response that is finished.

    Returns:
        Advantages [T] and returns A + V [T].

    Raises:
        ValueError: lengths differ, gamma or lam is not within 0 and 1, or a number is not finite.
    """
    if len(rewards) != len(values):
        raise ValueError(f"GAE needs one value for each reward, got {len(rewards)} rewards and {len(values)} values")
    for name, constant in (("gamma", gamma), ("lam", lam)):
        if not 0 <= constant <= 1:
            raise ValueError(f"{name} must be within 0 and 1, got {constant}")
    for name, numbers in (("rewards", rewards), ("values", values), ("next_value", [next_value])):
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"GAE got {name} that are not finite; the model or function that made them has diverged")
    advantages = [0.0] * len(rewards)
    later = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
        advantages[t], next_value = later, values[t]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """R_i = r_i + discount R_{i+1}, such as what each turn of a conversation has led to."""
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
    """Give a row its old values, returns and advantages at the tokens that are trained on, and 0 at the others.

    Tokens between them are stepped over: neither gamma nor lam counts them.

    Args:
        row: changed in place. Entry i of its ``values`` becomes the value before token i.
        rewards: reward of each token that is trained on, in order.
        values: value after each token of the row.
        bootstrap: the response goes on after its last trained token, and is worth there what ``values`` says; else 0.
    """
    actions = [index for index, counts in enumerate(row.trainable()) if counts]
    old = [values[index - 1] for index in actions]
    following = values[actions[-1]] if bootstrap and actions else 0.0
    advantages, returns = compute_gae(rewards, old, gamma=gamma, lam=lam, next_value=following)
    row.values, row.returns, row.advantages = ([0.0] * len(row.tokens) for _ in range(3))
    for place, *numbers in zip(actions, old, returns, advantages, strict=True):
        row.values[place], row.returns[place], row.advantages[place] = numbers


def whiten(rows: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    """(x - mean) / std over all tokens that are let through, population deviation.

    With a deviation of at most 1e-6 only the mean is removed; equal values give exactly zero.

    Args:
        rows: one list of per-token numbers per sequence.
        masks: of the same shape, True for tokens that count.

    Returns:
        Lists of the same shape, 0 where a token does not count.

    Raises:
        ValueError: shapes differ.
    """
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise ValueError(
            f"whiten needs a mask of the shape of its rows, got rows of {[len(row) for row in rows]} "
            f"and masks of {[len(mask) for mask in masks]} tokens"
        )
    kept = [x for row, mask in zip(rows, masks, strict=True) for x, keep in zip(row, mask, strict=True) if keep]
    if kept and min(kept) == max(kept):
        mean, deviation = kept[0], 0.0
    else:
        mean = math.fsum(kept) / max(len(kept), 1)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in kept) / max(len(kept), 1))
    scale = deviation if deviation > MIN_DEVIATION else 1.0
    return [
        [(x - mean) / scale if keep else 0.0 for x, keep in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]
