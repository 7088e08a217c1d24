"""GRPO: group-relative policy optimisation with token-level importance ratios (Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areno.loss_fns.pack import DataPack, reduces_over
from areno.loss_fns.policy import clipped_objective, is_clipped, log_ratio, policy_metrics
from areno.loss_fns.stats import masked_mean


@reduces_over("token")
def grpo_loss_fn(data_pack: DataPack, logprobs: Tensor, clip_eps: float = 0.2) -> tuple[Tensor, dict[str, Any]]:
    """L = -(1/N) sum_t m_t min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t), with r_t = pi(t) / pi_rollout(t).

    N counts the trainable tokens of the whole optimizer step. The ratio is taken against the log-probs that the rollout
    recorded, so it is 1 on the first pass and clips as soon as the policy has moved.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_logprobs``, ``packed_advantages``.
        logprobs: current log-probs [A].
        clip_eps: half-width of the clip range.

    Returns:
        Loss and statistics.
    """
    mask, advantage = data_pack["packed_response_mask"], data_pack["packed_advantages"]
    ratio = log_ratio(data_pack, logprobs).exp()
    losses = clipped_objective(ratio, advantage, clip_eps) * mask
    loss = losses.sum() / mask.sum().clamp(min=1)
    metrics = policy_metrics(data_pack, logprobs, ratio)
    metrics["policy_loss"] = metrics["total_loss"] = masked_mean(losses, mask)
    metrics["clip_fraction"] = masked_mean(is_clipped(ratio, advantage, clip_eps).float(), mask)
    return loss, metrics
