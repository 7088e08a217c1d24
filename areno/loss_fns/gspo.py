"""GSPO: group sequence policy optimisation with one importance ratio per sequence (Zheng et al. 2025, arXiv:2507.18071)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.pack import DataPack, reduces_over, sequence_sums
from areno.loss_fns.policy import clipped_objective, is_clipped, log_ratio, policy_metrics
from areno.loss_fns.stats import Mean


@reduces_over("sequence")
def gspo_loss_fn(data_pack: DataPack, logprobs: Tensor, clip_eps: float = 3.0e-4) -> tuple[Tensor, dict[str, Any]]:
    """L = -mean_i min(s_i A_i, clip(s_i, 1 - eps, 1 + eps) A_i), with s_i = exp((1/L_i) sum_t m_t (log pi - log pi_rollout)).

    A_i is the mean advantage of the sequence's trainable tokens. A sequence without any adds 0 and still counts.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_logprobs``, ``packed_advantages``, ``packed_seq_ids``.
        logprobs: current log-probs [A].
        clip_eps: half-width of the clip range.

    Returns:
        Loss and statistics.
    """
    mask = data_pack["packed_response_mask"]
    lengths = sequence_sums(mask.float(), data_pack).clamp(min=1.0)
    ratio = (sequence_sums(log_ratio(data_pack, logprobs), data_pack) / lengths).exp()
    advantage = sequence_sums(data_pack["packed_advantages"] * mask, data_pack) / lengths
    losses = clipped_objective(ratio, advantage, clip_eps)
    loss = losses.mean()
    count = torch.tensor(len(losses))
    metrics = policy_metrics(data_pack, logprobs, ratio[data_pack["packed_seq_ids"]])
    metrics["policy_loss"] = metrics["total_loss"] = Mean(losses.detach().sum(), count)
    metrics["clip_fraction"] = Mean(is_clipped(ratio, advantage, clip_eps).float().sum(), count)
    return loss, metrics
