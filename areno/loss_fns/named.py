"""The other losses of an experiment: those that exist, with the settings and the statistic names that experiments document.

A name that ends in ``/avg`` is the mean over the units of the loss; a trainer puts its section in front (``ppo_critic/``,
``sft/``, ``rw/``, ``dpo/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.pack import DataPack, in_float, reduces_over
from areno.loss_fns.policy import sequence_means
from areno.loss_fns.reward_model import reward_model_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.loss_fns.stats import Count, masked_range
from areno.loss_fns.value import value_loss_fn
from areno.types import TrainSequence

# exp(100) only means that a sequence is impossible; larger ones would not add up.
MAX_LOG_PPL = 100.0


def _renamed(metrics: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {f"{new}/avg": metrics[old] for new, old in names.items()}


@reduces_over("token")
def critic_loss_fn(data_pack: DataPack, values: Tensor, eps_clip: float = 0.5) -> tuple[Tensor, dict[str, Any]]:
    """L = mean over tokens of max((V - G)^2, (V_old + clip(V - V_old, -eps, eps) - G)^2) / 2; see :func:`value_loss_fn`.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_values``, ``packed_returns``.
        values: current value before each action [A].
        eps_clip: eps, in units of reward, above 0.

    Returns:
        Loss and the statistics critic_loss and clip_ratio, and new_value, old_value and target_value with their range.

    Raises:
        ValueError: ``eps_clip`` is not above 0, or the pack lacks values or returns.
    """
    loss, metrics = value_loss_fn(data_pack, values, eps_clip, 1.0)
    mask = data_pack["packed_response_mask"]
    tensors = {
        "new_value": values,
        "old_value": data_pack["packed_values"],
        "target_value": data_pack["packed_returns"],
    }
    ranges = {name: masked_range(tensor, mask) for name, tensor in tensors.items()}
    return loss, _renamed(metrics, {"critic_loss": "value_loss", "clip_ratio": "value_clipfrac"}) | ranges


@reduces_over("token")
def language_model_loss_fn(data_pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """:func:`sft_loss_fn`, with the statistics loss, and ppl, the perplexity of each sequence that has response tokens."""
    loss, metrics = sft_loss_fn(data_pack, logprobs)
    mask = data_pack["packed_response_mask"]
    means = sequence_means(torch.where(mask, in_float(logprobs.detach()), 0.0).double(), data_pack)
    counted = torch.zeros_like(means, dtype=torch.bool)
    counted[data_pack["packed_seq_ids"][mask]] = True
    return loss, _renamed(metrics, {"loss": "sft_loss"}) | {
        "ppl": masked_range((-means).clamp(max=MAX_LOG_PPL).exp(), counted)
    }


@reduces_over("pair")
def pair_score_loss_fn(data_pack: DataPack, scores: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """:func:`reward_model_loss_fn`, with the statistics loss, correct_ratio, pos_score, neg_score, n_pairs."""
    loss, metrics = reward_model_loss_fn(data_pack, scores)
    names = {"loss": "rm_loss", "correct_ratio": "rm_accuracy"}
    names |= {"pos_score": "rm_chosen_score", "neg_score": "rm_rejected_score"}
    return loss, _renamed(metrics, names) | {"n_pairs": Count(metrics["rm_loss"].count)}


@reduces_over("pair")
def preference_loss_fn(
    data_pack: DataPack, logprobs: Tensor, beta: float = 0.1, *, loss_type: str = "sigmoid"
) -> tuple[Tensor, dict[str, Any]]:
    """:func:`dpo_loss_fn`; ``ipo`` compares means per token, so that its target 1 / (2 beta) holds for any length.

    Args:
        data_pack: see :func:`dpo_loss_fn`.
        logprobs: current log-probs [A].
        beta: sharpness of the margin, above 0.
        loss_type: ``sigmoid`` or ``ipo``.

    Returns:
        Loss and the statistics loss, chosen_reward, rejected_reward, reward_accuracy, reward_margin.

    Raises:
        ValueError: as :func:`dpo_loss_fn`.
    """
    loss, metrics = dpo_loss_fn(data_pack, logprobs, beta, loss_type=loss_type, length_normalised=loss_type == "ipo")
    names = {"loss": "dpo_loss", "reward_accuracy": "dpo_accuracy", "reward_margin": "dpo_reward_margin"}
    names |= {"chosen_reward": "dpo_chosen_reward", "rejected_reward": "dpo_rejected_reward"}
    return loss, _renamed(metrics, names)


def usable_pairs(rows: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Rows of the pairs that can be compared: both sides have a token that counts.

    Args:
        rows: chosen and rejected in turn.

    Raises:
        ValueError: the number of rows is odd.
    """
    if len(rows) % 2:
        raise ValueError(
            f"pairs need an even number of rows, got {len(rows)}; rows alternate between chosen and rejected"
        )
    pairs = zip(rows[0::2], rows[1::2], strict=True)
    return [row for pair in pairs if all(any(side.trainable()) for side in pair) for row in pair]
