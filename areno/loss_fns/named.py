"""The other losses of an experiment: those that exist, with the settings and the statistic names that experiments document.

Each is told with its mean, least and greatest value over the units of the loss; a trainer puts its section in front
(``ppo_critic/``, ``sft/``, ``rw/``, ``dpo/``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.dpo import dpo_pairs
from areno.loss_fns.pack import DataPack, in_float, reduces_over
from areno.loss_fns.policy import sequence_means
from areno.loss_fns.reward_model import score_pairs
from areno.loss_fns.sft import sft_loss_fn
from areno.loss_fns.stats import Count, masked_range
from areno.loss_fns.value import value_tokens

# exp(100) only means that a sequence is impossible; larger ones would not add up.
MAX_LOG_PPL = 100.0


def _ranges(values: Mapping[str, Tensor], names: Mapping[str, str], mask: Tensor | None = None) -> dict[str, Any]:
    """The range of each tensor under its new name; without a mask all its elements count."""
    found = ((new, values[old]) for new, old in names.items())
    return {
        new: masked_range(each, torch.ones_like(each, dtype=torch.bool) if mask is None else mask)
        for new, each in found
    }


@reduces_over("token")
def critic_loss_fn(data_pack: DataPack, values: Tensor, eps_clip: float = 0.5) -> tuple[Tensor, dict[str, Any]]:
    """L = mean over tokens of max((V - G)^2, (V_old + clip(V - V_old, -eps, eps) - G)^2) / 2; see :mod:`areno.loss_fns.value`.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_values``, ``packed_returns``.
        values: current value before each action [A].
        eps_clip: eps, in units of reward, above 0.

    Returns:
        Loss and the statistics critic_loss, clip_ratio, new_value, old_value and target_value.

    Raises:
        ValueError: ``eps_clip`` is not above 0, or the pack lacks values or returns.
    """
    tokens, mask = value_tokens(data_pack, values, eps_clip, 1.0), data_pack["packed_response_mask"]
    names = {"critic_loss": "value_loss", "clip_ratio": "value_clipfrac", "new_value": "value_pred_mean"}
    names |= {"old_value": "old_value_mean", "target_value": "value_target_mean"}
    return tokens["value_loss"].sum() / mask.sum().clamp(min=1), _ranges(tokens, names, mask)


@reduces_over("token")
def language_model_loss_fn(data_pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """:func:`sft_loss_fn`, with the statistics loss, and ppl, the perplexity of each sequence that has response tokens."""
    loss, _ = sft_loss_fn(data_pack, logprobs)
    mask = data_pack["packed_response_mask"]
    means = sequence_means(torch.where(mask, in_float(logprobs.detach()), 0.0).double(), data_pack)
    counted = torch.zeros_like(means, dtype=torch.bool)
    counted[data_pack["packed_seq_ids"][mask]] = True
    return loss, {
        "loss": masked_range(-logprobs, mask),
        "ppl": masked_range((-means).clamp(max=MAX_LOG_PPL).exp(), counted),
    }


@reduces_over("pair")
def pair_score_loss_fn(data_pack: DataPack, scores: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """As :mod:`areno.loss_fns.reward_model` has it, with the statistics loss, correct_ratio, pos_score, neg_score, n_pairs."""
    pairs = score_pairs(data_pack, scores)
    names = {"loss": "loss", "correct_ratio": "accuracy", "pos_score": "chosen_score", "neg_score": "rejected_score"}
    losses = pairs["loss"]
    return losses.sum() / max(len(losses), 1), {**_ranges(pairs, names), "n_pairs": Count(torch.tensor(len(losses)))}


@reduces_over("pair")
def preference_loss_fn(
    data_pack: DataPack, logprobs: Tensor, beta: float = 0.1, *, loss_type: str = "sigmoid"
) -> tuple[Tensor, dict[str, Any]]:
    """As :mod:`areno.loss_fns.dpo` has it; ``ipo`` compares means per token, so its target 1 / (2 beta) holds for any length.

    Args:
        data_pack: see :mod:`areno.loss_fns.dpo`.
        logprobs: current log-probs [A].
        beta: sharpness of the margin, above 0.
        loss_type: ``sigmoid`` or ``ipo``.

    Returns:
        Loss and the statistics loss, chosen_reward, rejected_reward, reward_accuracy, reward_margin.

    Raises:
        ValueError: as :func:`areno.loss_fns.dpo.dpo_loss_fn`.
    """
    pairs = dpo_pairs(data_pack, logprobs, beta, loss_type=loss_type, length_normalised=loss_type == "ipo")
    names = {"reward_accuracy": "accuracy"}
    names |= {name: name for name in ("loss", "reward_margin", "chosen_reward", "rejected_reward")}
    losses = pairs["loss"]
    return losses.sum() / max(len(losses), 1), _ranges(pairs, names)
