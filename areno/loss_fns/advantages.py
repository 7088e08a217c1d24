"""Advantages from rewards."""

from __future__ import annotations

from collections.abc import Sequence


def compute_group_advantages(rewards: Sequence[float], eps: float = 1e-8) -> list[float]:
    """Rewards of one prompt's samples, standardised: (r - mean) / (std + eps), population deviation.

    Equal rewards give exactly zero, whatever their value: a mean that is not representable must not turn rounding into
    a learning signal.

    Args:
        rewards: one finite reward per sample.
        eps: keeps the division finite.

    Returns:
        One advantage per sample.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + eps) for r in rewards]
