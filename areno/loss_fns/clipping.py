"""Functions that all policy losses share: importance ratios, clipping, averages and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.loss_fns.loss_interface import DataPack, in_float, sequence_sums
from areno.loss_fns.stats import Mean, masked_mean, masked_spread

# exp(20) is finite in fp32 and far outside any clip range.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds on the importance ratio r.

    Attributes:
        eps_high: the upper bound is 1 + ``eps_high``; None means 1 + ``eps``. A higher bound lets the probability of
            unlikely tokens grow faster (DAPO, Yu et al. 2025, arXiv:2503.14476).
        dual: where the advantage A is negative, the loss is at most ``dual * abs(A)`` (Ye et al. 2020,
            arXiv:1912.09729). If None, the loss has no upper bound.

    Raises:
        ValueError: ``eps`` or ``eps_high`` is negative, or ``dual`` is not above 1.
    """

    eps: float  # the lower bound is 1 - eps
    eps_high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        for name, width in (("clip_eps", self.eps), ("clip_eps_high", self.eps_high)):
            if width is not None and not width >= 0:
                raise ValueError(f"{name} must not be negative, got {width}")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"the dual clip (dual_clip, clip_ratio_c) must be above 1, got {self.dual}")

    @classmethod
    def open(cls, eps: float, eps_high: float | None = None, dual: float | None = None) -> Clip:
        """Create a :class:`Clip`. Unlike the constructor, raise ValueError also if ``eps`` or ``eps_high`` is 0."""
        for name, width in (("clip_eps", eps), ("clip_eps_high", eps_high)):
            if width is not None and not width > 0:
                raise ValueError(f"{name} must be above 0, got {width}")
        return cls(eps, eps_high, dual)

    @property
    def low(self) -> float:
        """Lower bound on the importance ratio."""
        return 1.0 - self.eps

    @property
    def high(self) -> float:
        """Upper bound on the importance ratio."""
        return 1.0 + (self.eps if self.eps_high is None else self.eps_high)

    def objective(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Compute the clipped loss -min(r A, clip(r) A) elementwise (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        If ``dual`` is set, the loss is at most ``dual * abs(A)`` where A < 0. A ratio that equals a bound keeps its
        full gradient. This matters with ``eps=0`` (M2PO): both bounds are then 1, like the ratio at the start of an update.
        """
        bounded = torch.where(self.is_high(ratio, advantage), self.high, ratio)
        bounded = torch.where(self.is_low(ratio, advantage), self.low, bounded)
        if self.dual is not None:
            bounded = torch.where(self.is_dual(ratio, advantage), self.dual, bounded)
        return -bounded * advantage

    def is_high(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return True where ``ratio`` is above ``high`` and the advantage is positive: the gradient of the loss is 0 there."""
        return (ratio > self.high) & (advantage > 0)

    def is_low(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return True where ``ratio`` is below ``low`` and the advantage is negative: the gradient of the loss is 0 there."""
        return (ratio < self.low) & (advantage < 0)

    def is_dual(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return True where ``ratio`` is above ``dual`` and the advantage is negative: the gradient of the loss is 0 there.

        If ``dual`` is None, the result is False everywhere.
        """
        bound = torch.inf if self.dual is None else self.dual
        return (ratio > bound) & (advantage < 0)

    def removes(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return True where the upper, lower or dual bound makes the gradient of the loss 0."""
        return self.is_high(ratio, advantage) | self.is_low(ratio, advantage) | self.is_dual(ratio, advantage)

    def fractions(self, ratio: Tensor, advantage: Tensor, mask: Tensor) -> dict[str, Mean]:
        """Compute the fraction of the entries under ``mask`` that are clipped (see :meth:`removes`).

        The result has one fraction for all bounds together, and one fraction for each bound.
        """
        high, low = self.is_high(ratio, advantage), self.is_low(ratio, advantage)
        removed = self.removes(ratio, advantage)
        shares = {"clip_fraction": removed, "clip_fraction_high": high, "clip_fraction_low": low}
        if self.dual is not None:
            shares["clip_fraction_dual"] = self.is_dual(ratio, advantage)
        return {name: masked_mean(share.float(), mask) for name, share in shares.items()}


def log_difference(pack: DataPack, logprobs: Tensor) -> Tensor:
    """Compute log pi - log pi_rollout of each token; 0 outside the response mask."""
    difference = in_float(logprobs) - in_float(pack["packed_logprobs"])
    return torch.where(pack["packed_response_mask"], difference, 0.0)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio), with log_ratio clamped to the range from -``MAX_LOG_RATIO`` to ``MAX_LOG_RATIO``."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def advantages_of(pack: DataPack) -> Tensor:
    """Return the advantage of each token; 0 outside the response mask."""
    return torch.where(pack["packed_response_mask"], in_float(pack["packed_advantages"]), 0.0)


def over_tokens(values: Tensor, pack: DataPack) -> Mean:
    """Compute the differentiable mean of ``values`` over all response tokens.

    ``values`` has one entry per token. Entries outside the response mask must be 0.
    """
    return Mean(values.sum(), pack["packed_response_mask"].sum())


def over_sequences(values: Tensor) -> Mean:
    """Compute the mean over all sequences, with gradient. ``values`` has one entry per sequence."""
    return Mean(values.sum(), torch.tensor(len(values)))


def sequence_means(values: Tensor, pack: DataPack, mask: Tensor | None = None) -> Tensor:
    """Compute, for each sequence, the mean of ``values`` over the tokens that ``mask`` selects.

    ``values`` and ``mask`` have one entry per token. If ``mask`` is None, the response mask is used. Returns one mean per
    sequence; 0 for a sequence without selected tokens.
    """
    mask = pack["packed_response_mask"] if mask is None else mask
    lengths = sequence_sums(mask.to(values.dtype), pack)
    return sequence_sums(torch.where(mask, values, 0.0), pack) / lengths.clamp(min=1.0)


def with_kl(policy: Mean, kl: Mean | None, coef: float) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss ``policy + coef * kl`` and its statistics.

    ``policy`` and ``kl`` must be means over the same tokens or over the same sequences.
    """
    total = policy.total if kl is None else policy.total + coef * kl.total
    metrics: dict[str, Any] = {
        "policy_loss": policy.detached(),
        "total_loss": Mean(total.detach(), policy.count),
    }
    if kl is not None:
        metrics |= kl_metrics(kl, coef)
    return total / policy.count.clamp(min=1), metrics


def kl_metrics(kl: Mean, coef: float) -> dict[str, Any]:
    """Return the statistics of a KL term: its mean and its weight."""
    return {"kl_loss": kl.detached(), "kl_coef": Mean(torch.tensor(coef, dtype=torch.float64), torch.tensor(1))}


def policy_metrics(pack: DataPack, logprobs: Tensor, ratio: Tensor) -> dict[str, Any]:
    """Return the statistics that all policy losses report. ``ratio`` has the importance ratio of each token."""
    mask = pack["packed_response_mask"]
    difference = log_difference(pack, logprobs.detach())
    lengths = sequence_sums(mask.float(), pack)
    metrics: dict[str, Any] = {
        "ratio": masked_spread(ratio, mask),
        "advantage_mean": masked_mean(pack["packed_advantages"], mask),
        "response_len": Mean(lengths.sum(), torch.tensor(len(lengths))),
        "rollout_logprobs_mean": masked_mean(pack["packed_logprobs"], mask),
        "train_logprobs_mean": masked_mean(logprobs, mask),
        "logp_diff_mean": masked_mean(difference, mask),
        "logp_abs_diff_mean": masked_mean(difference.abs(), mask),
    }
    if "packed_entropy" in pack:
        metrics["entropy"] = masked_mean(pack["packed_entropy"], mask)
    return metrics
