"""GSPO: group sequence policy optimization with one importance ratio per sequence (Zheng et al. 2025, arXiv:2507.18071)."""

from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.clipping import (
    Clip,
    advantages_of,
    log_difference,
    over_sequences,
    policy_metrics,
    ratio_of,
    sequence_means,
    with_kl,
)
from areno.loss_fns.kl import reference_kl
from areno.loss_fns.loss_interface import DataPack, reduces_over
from areno.loss_fns.stats import TokenFlags


@reduces_over("sequence", entropy=True)
def gspo_loss_fn(
    data_pack: DataPack,
    logprobs: Tensor,
    clip_eps: float = 3.0e-4,
    *,
    clip_eps_high: float | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
) -> tuple[Tensor, dict[str, Any]]:
    """Compute L = mean over sequences i of -min(s_i A_i, clip(s_i, 1 - eps, 1 + eps_high) A_i) + kl_coef KL_i.

    The importance ratio of sequence i is s_i = exp(mean_t(log pi(t) - log pi_rollout(t))). mean_t is the mean over the
    response tokens t of the sequence. A_i is mean_t of the advantage, and KL_i is mean_t of the KL estimate. The mean
    over sequences includes sequences without response tokens. The loss of such a sequence is 0.
    :func:`~areno.loss_fns.grpo.grpo_loss_fn` describes the clip range and the KL term.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_logprobs``, ``packed_advantages``, ``packed_seq_ids`` and
            ``packed_num_sequences``. A KL term also needs ``packed_ref_logprobs``.

    Raises:
        ValueError: an argument is out of range, or the pack lacks a required tensor.
    """
    clip = Clip.open(clip_eps, clip_eps_high)
    advantage = sequence_means(advantages_of(data_pack), data_pack)
    ratio = ratio_of(sequence_means(log_difference(data_pack, logprobs), data_pack))
    kl = reference_kl(data_pack, logprobs, kl_coef, kl_type)
    kl_mean = None if kl is None else over_sequences(sequence_means(kl, data_pack))
    loss, metrics = with_kl(over_sequences(clip.objective(ratio, advantage)), kl_mean, kl_coef)
    ids, mask = data_pack["packed_seq_ids"], data_pack["packed_response_mask"]
    metrics |= policy_metrics(data_pack, logprobs, ratio[ids])
    metrics |= clip.fractions(ratio, advantage, torch.ones_like(ratio, dtype=torch.bool))
    metrics["clipped"] = TokenFlags(clip.removes(ratio, advantage)[ids] & mask)
    return loss, metrics
