"""Reward shaping: converts task rewards to per-token advantages.

If ``part_weights`` is set, each reward part (such as correctness or format) is first standardized within each group, and the
weighted sum of the standardized parts replaces the task reward. Next, the overlong penalty, bias, scaling and clip are
applied, and the rewards are normalized over samples. The result is the shaped reward R'. The last trained token gets R' plus
its KL reward. All earlier trained tokens get only their KL rewards. Finally, GAE runs over the trained tokens, and the
advantages are normalized over tokens. GAE skips untrained tokens (prompts and tool results), so untrained tokens add no
discount.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.advantages import normalized_parts
from areno.loss_fns.gae import fill_gae
from areno.loss_fns.kl import kl_penalty
from areno.loss_fns.rejection import second_moment_keep
from areno.types import TrainSequence

# Bounds the KL of a token, so that one token cannot outweigh the task reward.
MAX_KL = 10.0

RewardNorm = Callable[[Tensor, Sequence[int]], Tensor]
"""Function that normalizes the rewards of a batch. It takes the reward and the group index of each sample, as
:class:`~areno.loss_fns.norm.Norm` does, and returns the normalized rewards, float64 [B].
"""
AdvantageNorm = Callable[[Tensor, Sequence[int], Sequence[bool]], Tensor]
"""Function that normalizes the advantages of the tokens of a batch.

It takes the advantage of each token, the group index of each token and a mask, which is True for the tokens to normalize. It
returns the normalized advantages, float64. :class:`~areno.loss_fns.norm.Norm` is such a function.
"""


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """Settings of reward shaping, named as in the ``actor`` section of an experiment.

    ``overlong_reward_penalty`` subtracts a penalty from the rewards of long answers (DAPO, Yu et al. 2025,
    arXiv:2503.14476, eq. 13). Answers of up to ``max_new_tokens - overlong_tokens`` tokens get no penalty. For longer
    answers, the penalty grows linearly with the length, and is ``overlong_penalty_factor`` at ``max_new_tokens``
    tokens.

    With ``mask_no_eos_with_zero``, the task reward and the advantages of a truncated answer are 0, ``adv_norm`` ignores
    the answer, and trainers omit the answer from the update (see :func:`untruncated`).

    GAE needs a value after the last trained token. For a truncated answer, this value comes from the critic if there is a
    critic and ``bootstrap_truncated`` is set. In all other cases, the value is 0.

    Raises:
        ValueError: a setting is out of range, or a setting of the overlong penalty is missing.
    """

    part_weights: Mapping[str, float] | None = None  # weights of normalized reward parts; None: total rewards are used
    reward_bias: float = 0.0  # added to the reward
    reward_scaling: float = 1.0  # factor on the biased reward
    reward_clip: float = 20.0  # bound on the magnitude of the scaled reward, above 0
    overlong_reward_penalty: bool = False
    overlong_tokens: int | None = None  # number of last tokens of ``max_new_tokens`` that are penalized, above 0
    overlong_penalty_factor: float | None = None  # penalty at ``max_new_tokens``, not negative
    max_new_tokens: int = 1024  # maximum answer length in tokens
    mask_no_eos_with_zero: bool = False
    reward_norm: RewardNorm | None = None  # normalization over samples, if any
    kl_ctl: float = 0.0  # weight of the KL reward, not negative; above 0 it needs reference log-probs
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # see :func:`~areno.loss_fns.kl.kl_penalty`
    discount: float = 1.0  # gamma of GAE, 0 to 1
    gae_lambda: float = 1.0  # lambda of GAE, 0 to 1
    bootstrap_truncated: bool = True
    adv_norm: AdvantageNorm | None = None  # normalization over trained tokens, if any

    def __post_init__(self) -> None:
        if not self.reward_clip > 0:
            raise ValueError(f"reward_clip must be above 0, got {self.reward_clip}")
        if not self.kl_ctl >= 0:
            raise ValueError(f"kl_ctl must not be negative, got {self.kl_ctl}; set kl_ctl=0 to disable the KL reward")
        if self.kl_estimator not in ("k1", "k2", "k3"):
            raise ValueError(f"kl_estimator must be k1, k2 or k3, got {self.kl_estimator!r}")
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.overlong_reward_penalty:
            for name, minimum in (("overlong_tokens", 1), ("overlong_penalty_factor", 0)):
                value = getattr(self, name)
                if value is None or not value >= minimum:
                    raise ValueError(f"overlong_reward_penalty=true needs {name} of at least {minimum}, got {value}")

    def penalty(self, tokens: int) -> float:
        """Return the length penalty, 0 or negative, of a row with ``tokens`` trained tokens.

        The penalty of a single answer is at least -``overlong_penalty_factor``. The penalty of a row with several turns
        can be lower, because the row can be longer than ``max_new_tokens``.
        """
        if not self.overlong_reward_penalty:
            return 0.0
        assert self.overlong_tokens is not None
        assert self.overlong_penalty_factor is not None
        over = tokens - (self.max_new_tokens - self.overlong_tokens)
        return min(-over / self.overlong_tokens * self.overlong_penalty_factor, 0.0)

    def rewards(self, raw: Sequence[float], lengths: Sequence[int], groups: Sequence[int]) -> Tensor:
        """Compute the shaped rewards R', float64 [B].

        Args:
            raw: task rewards [B].
            lengths: number of trained tokens of each sample [B].
            groups: index of the group in which each sample is normalized [B].
        """
        if self.part_weights is not None:
            raw = normalized_parts(raw, groups, self.part_weights)
        penalized = [reward + self.penalty(length) for reward, length in zip(raw, lengths, strict=True)]
        biased = torch.tensor(penalized, dtype=torch.float64) + self.reward_bias
        shaped = (biased * self.reward_scaling).clamp(-self.reward_clip, self.reward_clip)
        return shaped if self.reward_norm is None else self.reward_norm(shaped, groups)


@dataclass(frozen=True, slots=True)
class Credits:
    """Rewards of segments.

    A segment, such as a turn or a whole sample, is a set of tokens that share one reward. A sample may have several rows.
    """

    rewards: Sequence[float]  # reward of each segment
    groups: Sequence[int]  # comparison group of each segment
    owners: Sequence[Sequence[int]]  # per row, the segment index of each token; negative for none


def shape_advantages(
    rows: Sequence[TrainSequence], shaping: RewardShaping, values: Sequence[Sequence[float]] | None = None
) -> dict[str, Tensor]:
    """Set the ``advantages`` and ``returns`` of each row and, with a critic, the ``values``.

    Args:
        rows: changed in place. Each row needs ``reward``, ``group`` and ``truncated``. A KL reward also needs
            ``logprobs`` and ``ref_logprobs``.
        values: the critic's value after each token of each row; None without a critic.

    Returns:
        For each metric, a float64 tensor of values to summarize as mean, minimum and maximum. Per row: ``task_reward`` (raw),
        ``kl_rewards`` (sum over the tokens), ``final_reward`` (shaped reward plus ``kl_rewards``), ``no_eos_ratios``
        (1 if truncated, else 0), ``prompt_len``, ``seq_len``, ``correct_seq_len`` (only rows with a task reward above 0)
        and ``incorrect_seq_len`` (all other rows). Per token: ``advantages``, and ``gae_advantages`` (the
        advantages before ``adv_norm``).

    Raises:
        ValueError: there are no rows, a row lacks log-probs for the KL reward, or a number is not finite.
    """
    if not rows:
        raise ValueError("shape_advantages needs at least one row, got none")
    if values is not None and len(values) != len(rows):
        raise ValueError(
            f"shape_advantages needs values for each of the {len(rows)} rows, got values for {len(values)} rows"
        )
    lengths = [sum(row.trainable()) for row in rows]
    shaped = shaping.rewards([row.reward for row in rows], lengths, [row.group for row in rows]).tolist()
    kl_sums, finals = [], []
    for index, row in enumerate(rows):
        kl = _kl_rewards(row, shaping)
        rewards = list(kl)
        if rewards and not (shaping.mask_no_eos_with_zero and row.truncated):
            rewards[-1] += shaped[index]
        row_values = [0.0] * len(row.tokens) if values is None else values[index]
        bootstrap = values is not None and row.truncated and shaping.bootstrap_truncated
        fill_gae(row, rewards, row_values, gamma=shaping.discount, lam=shaping.gae_lambda, bootstrap=bootstrap)
        if values is None:
            row.values = []
        kl_sums.append(sum(kl))
        finals.append(sum(rewards))
    before = trained_values(rows, "advantages")
    _normalize(rows, shaping)
    return _populations(rows, kl_sums, finals) | {"gae_advantages": torch.tensor(before, dtype=torch.float64)}


def credit_advantages(rows: Sequence[TrainSequence], shaping: RewardShaping, credits: Credits) -> dict[str, Tensor]:
    """Set the advantage of each trained token, and normalize the advantages.

    ``credits`` divides the tokens into segments, and has one reward per segment. Before normalization, the advantage of a
    token is the sum of two terms: the shaped reward of the token's segment, and the advantage that GAE computes from the
    KL rewards alone. The ``reward`` of the rows is ignored.

    Returns a dictionary with one entry: ``kl_rewards`` contains the sum of the KL rewards of each row (float64).
    """
    lengths = [0] * len(credits.rewards)
    for row, owners in zip(rows, credits.owners, strict=True):
        for owner, trained in zip(owners, row.trainable(), strict=True):
            lengths[owner] += trained and owner >= 0
    shaped = shaping.rewards(credits.rewards, lengths, credits.groups).tolist()
    kl_sums = []
    for row, owners in zip(rows, credits.owners, strict=True):
        rewards, kl = _kl_rewards(row, shaping), [0.0] * len(row.tokens)
        kl_sums.append(sum(rewards))
        if shaping.kl_ctl > 0:
            fill_gae(row, rewards, kl, gamma=shaping.discount, lam=shaping.gae_lambda, bootstrap=False)
            kl, row.values, row.returns = row.advantages, [], []
        tokens = zip(owners, row.trainable(), kl, strict=True)
        row.advantages = [shaped[owner] + x if trained and owner >= 0 else x for owner, trained, x in tokens]
    _normalize(rows, shaping)
    return {"kl_rewards": torch.tensor(kl_sums, dtype=torch.float64)}


def trained_values(rows: Sequence[TrainSequence], name: str) -> list[float]:
    """Return the entries for trained tokens from the per-token list ``name`` of each row, concatenated over the rows."""
    return [
        value for row in rows for value, trained in zip(getattr(row, name), row.trainable(), strict=True) if trained
    ]


def _kl_rewards(row: TrainSequence, shaping: RewardShaping) -> list[float]:
    """Compute the KL reward of each trained token: the token's KL estimate times ``-kl_ctl``."""
    if shaping.kl_ctl == 0:
        return [0.0] * sum(row.trainable())
    if not row.ref_logprobs or not row.logprobs:
        raise ValueError(
            f"kl_ctl={shaping.kl_ctl} needs logprobs and ref_logprobs (log-probs of the reference model) in every row, but a "
            "row lacks at least one of them; configure a reference model (ref), or set kl_ctl=0"
        )
    columns = [trained_values([row], name) for name in ("logprobs", "ref_logprobs")]
    old, reference = torch.tensor(columns, dtype=torch.float64)
    kl = kl_penalty(old, reference, shaping.kl_estimator).clamp(-MAX_KL, MAX_KL)
    return (-shaping.kl_ctl * kl).tolist()


def _normalize(rows: Sequence[TrainSequence], shaping: RewardShaping) -> None:
    masked = [shaping.mask_no_eos_with_zero and row.truncated for row in rows]
    if shaping.adv_norm is not None:
        flat = torch.tensor(list(chain.from_iterable(row.advantages for row in rows)), dtype=torch.float64)
        groups = list(chain.from_iterable([row.group] * len(row.tokens) for row in rows))
        mask = [trained and not out for row, out in zip(rows, masked, strict=True) for trained in row.trainable()]
        normalized = shaping.adv_norm(flat, groups, mask).split([len(row.tokens) for row in rows])
        for row, advantages in zip(rows, normalized, strict=True):
            row.advantages = advantages.tolist()
    for row, out in zip(rows, masked, strict=True):
        if out:
            row.advantages = [0.0] * len(row.tokens)


def _populations(rows: Sequence[TrainSequence], kl_sums: Sequence[float], finals: Sequence[float]) -> dict[str, Tensor]:
    correct = [row.reward > 0 for row in rows]
    lengths = [len(row.tokens) for row in rows]
    populations: dict[str, Sequence[float]] = {
        "task_reward": [row.reward for row in rows],
        "kl_rewards": kl_sums,
        "final_reward": finals,
        "no_eos_ratios": [float(row.truncated) for row in rows],
        "prompt_len": [sum(row.prompt_mask) for row in rows],
        "seq_len": lengths,
        "correct_seq_len": [n for n, is_correct in zip(lengths, correct, strict=True) if is_correct],
        "incorrect_seq_len": [n for n, is_correct in zip(lengths, correct, strict=True) if not is_correct],
        "advantages": trained_values(rows, "advantages"),
    }
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in populations.items()}


def sizes(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Return the numbers of sequences, tokens and trained tokens of a batch, by metric name."""
    return {
        "n_seqs": float(len(rows)),
        "n_tokens": float(sum(len(row.tokens) for row in rows)),
        "n_valid_tokens": float(sum(sum(row.trainable()) for row in rows)),
    }


def row_counts(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Count sequences (in total, with reward > 0, and with reward <= 0), tokens and trained tokens; see :func:`sizes`."""
    correct = sum(row.reward > 0 for row in rows)
    return {
        **sizes(rows),
        "correct_n_seqs": float(correct),
        "incorrect_n_seqs": float(len(rows) - correct),
    }


def summaries(populations: dict[str, Tensor]) -> dict[str, float]:
    """Return ``<name>/avg``, ``<name>/min`` and ``<name>/max`` for each entry of ``populations`` that is not empty."""
    return {
        f"{name}/{kind}": float(number)
        for name, numbers in populations.items()
        if len(numbers)
        for kind, number in (("avg", numbers.mean()), ("min", numbers.min()), ("max", numbers.max()))
    }


def untruncated(rows: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the rows that are not truncated. With ``mask_no_eos_with_zero``, only these rows are trained on."""
    return [row for row in rows if not row.truncated]


def select_by_second_moment(rows: Sequence[TrainSequence], threshold: float) -> float:
    """Set ``keep`` of each row to True for the tokens that M2PO keeps; see :func:`second_moment_keep`.

    Args:
        rows: all rows of the batch, before the division into optimizer steps, with ``logprobs`` and ``prox_logprobs``.
        threshold: bound on the mean square of the log-ratio, above 0.

    Returns:
        Fraction of the trained tokens that M2PO does not keep.

    Raises:
        ValueError: a row lacks log-probs, or the threshold is not above 0.
    """
    for index, row in enumerate(rows):
        if not row.prox_logprobs or not row.logprobs:
            raise ValueError(f"m2_threshold={threshold} needs logprobs and prox_logprobs; set both in row {index}")
    columns = [
        torch.tensor(list(chain.from_iterable(getattr(row, name) for row in rows)), dtype=torch.float64)
        for name in ("prox_logprobs", "logprobs")
    ]
    mask = torch.tensor(list(chain.from_iterable(row.trainable() for row in rows)), dtype=torch.bool)
    keep = second_moment_keep(columns[0], columns[1], mask, threshold)
    for row, row_keep in zip(rows, keep.split([len(row.tokens) for row in rows]), strict=True):
        row.keep = row_keep.tolist()
    return float((mask & ~keep).sum()) / max(int(mask.sum()), 1)


def version_statistics(rows: Sequence[TrainSequence], version: int) -> dict[str, float]:
    """Return statistics of the staleness of the trained tokens, named ``version_stats/...``.

    ``version`` is the weight version that the update produces (the engine's version plus one). Staleness is
    measured relative to this version (``theta`` in the names) and to the version before the update (``proximal``).
    """
    for index, row in enumerate(rows):
        if not row.versions:
            raise ValueError(
                f"statistics of staleness need the weight versions of all tokens, but row {index} has none; set `versions` in "
                f"row {index}"
            )
    sampled = [version for version in trained_values(rows, "versions") if version >= 0]
    stats = {
        "v_theta": float(version),
        "v_proximal": float(version - 1),
        "n_valid_generated_tokens": float(len(sampled)),
    }
    for name, newest in (("proximal", version - 1), ("theta", version)) if sampled else ():
        staleness = [newest - v for v in sampled]
        stats[f"sample_staleness_{name}_avg"] = sum(staleness) / len(staleness)
        stats[f"sample_staleness_{name}_max"] = float(max(staleness))
        stats[f"sample_staleness_{name}_min"] = float(min(staleness))
    return {f"version_stats/{name}": value for name, value in stats.items()}
