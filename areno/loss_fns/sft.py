"""Supervised fine-tuning: negative log-likelihood of the response tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.pack import DataPack, in_float, reduces_over
from areno.loss_fns.stats import Count, masked_mean


@reduces_over("token")
def sft_loss_fn(data_pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """L = -(sum_t m_t log pi(t)) / (sum_t m_t), over all target tokens of the optimizer step.

    Args:
        data_pack: needs ``packed_response_mask``.
        logprobs: current log-probs [A].

    Returns:
        Loss and the statistics sft_loss, sft_logprob_mean, sft_target_tokens.
    """
    mask = data_pack["packed_response_mask"]
    loss = -torch.where(mask, in_float(logprobs), 0.0).sum() / mask.sum().clamp(min=1)
    return loss, {
        "sft_loss": masked_mean(-logprobs, mask),
        "sft_logprob_mean": masked_mean(logprobs, mask),
        "sft_target_tokens": Count(mask.sum()),
    }
