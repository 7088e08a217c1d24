"""What the clipped policy-gradient losses share: importance ratios and the statistics of a policy step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.pack import DataPack, sequence_sums
from areno.loss_fns.stats import Mean, masked_mean, masked_spread

# exp(20) is finite in fp32 and far outside any clip range; beyond it a ratio only means "clipped".
MAX_LOG_RATIO = 20.0


def log_ratio(pack: DataPack, logprobs: Tensor) -> Tensor:
    """log pi - log pi_rollout [A], bounded, 0 outside the response mask."""
    difference = (logprobs - pack["packed_logprobs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(pack["packed_response_mask"], difference, 0.0)


def clipped_objective(ratio: Tensor, advantage: Tensor, eps: float) -> Tensor:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A), elementwise (Schulman et al. 2017, eq. 7)."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - eps, 1.0 + eps) * advantage)


def is_clipped(ratio: Tensor, advantage: Tensor, eps: float) -> Tensor:
    """True where the clipped branch is active, so that the gradient is zero."""
    return ((ratio > 1.0 + eps) & (advantage > 0)) | ((ratio < 1.0 - eps) & (advantage < 0))


def policy_metrics(pack: DataPack, logprobs: Tensor, ratio: Tensor) -> dict[str, Any]:
    """Statistics that every policy loss reports; ``ratio`` is per token [A]."""
    mask = pack["packed_response_mask"]
    difference = logprobs.detach() - pack["packed_logprobs"]
    lengths = sequence_sums(mask.float(), pack)
    return {
        "ratio": masked_spread(ratio, mask),
        "advantage_mean": masked_mean(pack["packed_advantages"], mask),
        "response_len": Mean(lengths.sum(), torch.tensor(len(lengths))),
        "rollout_logprobs_mean": masked_mean(pack["packed_logprobs"], mask),
        "train_logprobs_mean": masked_mean(logprobs, mask),
        "logp_diff_mean": masked_mean(difference, mask),
        "logp_abs_diff_mean": masked_mean(difference.abs(), mask),
    }
