"""Advantage estimators, which compute one advantage per sample from the rewards of a group or of a batch.

An estimator is ``estimator(rewards, groups) -> advantages`` over all samples of a step. ``groups`` contains the prompt
index of each sample. If all samples of the group or of the batch have the same reward, the advantages of these samples
are exactly 0, so that rounding errors never become a learning signal. ``ValueError`` is raised if lengths differ, or if a
reward is not finite.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from areno.errors import RewardError
from areno.types import part_columns


def compute_group_advantages(rewards: Sequence[float], eps: float = 1e-8) -> list[float]:
    """Standardize the rewards of one prompt's samples: (r - mean) / (std + eps), with the population std.

    If all rewards are equal, all advantages are exactly 0. See Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    centered = _centered(rewards)
    deviation = math.hypot(*centered) / math.sqrt(max(len(centered), 1))
    return [c / (deviation + eps) for c in centered]


def _centered(rewards: Sequence[float]) -> list[float]:
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    others = max(len(rewards) - 1, 1)
    return [c * len(rewards) / others for c in _centered(rewards)]


def _per_group(
    rewards: Sequence[float], groups: Sequence[int], fn: Callable[[list[float]], list[float]]
) -> list[float]:
    if len(rewards) != len(groups):
        raise ValueError(f"each reward needs a group index, got {len(rewards)} rewards and {len(groups)} group indices")
    members: dict[int, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(
                f"reward {index} is {reward}, but advantages need finite rewards; check the reward function"
            )
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        for index, advantage in zip(indices, fn([rewards[i] for i in indices]), strict=True):
            advantages[index] = advantage
    return advantages


def group_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Apply :func:`compute_group_advantages` to the samples of each prompt."""
    return _per_group(rewards, groups, compute_group_advantages)


def group_mean_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Subtract the mean reward of the prompt's samples, without dividing by std (Dr. GRPO, arXiv:2503.20783)."""
    return _per_group(rewards, groups, _centered)


def rloo_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Subtract from each reward the mean reward of the prompt's other samples; 0 for a prompt with a single sample.

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740.
    """
    return _per_group(rewards, groups, _leave_one_out)


def batch_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Standardize the rewards over all samples of the step (REINFORCE++, Hu et al. 2025, arXiv:2501.03262)."""
    return _per_group(rewards, [0] * len(groups), compute_group_advantages)


def normalized_parts(rewards: Sequence[float], groups: Sequence[int], weights: Mapping[str, float]) -> list[float]:
    """Standardize each reward part over the prompt's samples, and return the weighted sum of the standardized parts.

    The result is sum_k w_k (r_k - mean(r_k)) / (std(r_k) + eps) over the reward parts k.

    GDPO (Liu et al. 2026, arXiv:2601.05242) applies :func:`batch_advantages` to the result.

    Raises:
        RewardError: the rewards have no parts.
    """
    columns = part_columns(rewards)
    if not columns:
        raise RewardError(
            "the reward has no parts to normalize; return a dictionary from the reward function, or omit "
            "--reward-normalize-parts (reward.normalize_parts)"
        )
    scores = [[weights.get(name, 1.0) * z for z in group_advantages(part, groups)] for name, part in columns.items()]
    return [math.fsum(parts) for parts in zip(*scores, strict=True)]
