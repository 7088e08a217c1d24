"""Rejection sampling: handle tokens or sequences on which the proximal and the behavior policy differ too much.

With ``action="mask"``, these tokens or sequences are excluded from the loss. With ``action="clamp"``, all tokens are kept, and
importance weights outside the bounds are clamped.

The importance weight r = pi_proximal / pi_behavior corrects for stale samples (decoupled PPO, Hilton et al. 2022,
arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298). IcePop (Ling Team 2025, arXiv:2510.18855) masks tokens whose r is
below a lower bound or above an upper bound.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.config.options import check_options
from areno.config.policy_loss_options import RejectionSamplingConfig
from areno.loss_fns.clipping import MAX_LOG_RATIO, ratio_of, sequence_means
from areno.loss_fns.loss_interface import DataPack, in_float

# Keeps probabilities away from 0 and 1, where the divergence is infinite.
MIN_PROBABILITY = 1e-8


@dataclass
class RejectionSampling(RejectionSamplingConfig):
    """Bounds on the divergence between the proximal and the behavior policy, as measured by a metric.

    r = pi_proximal / pi_behavior is the ratio of a token's probabilities under the two policies, and d is log r. The
    metrics are

    - ``ratio``: r
    - ``kl_k1``: d
    - ``kl_k2``: d^2 / 2
    - ``kl_k3``: r - log r - 1
    - ``binary_kl`` (the metric of KPop): the larger of KL(pi_proximal || pi_behavior) and KL(pi_behavior ||
      pi_proximal), each over two outcomes: the sampled token, and any other token

    Raises:
        ValueError: ``level``, ``action``, ``metric`` or ``agg`` has an unknown value, or a bound is invalid.
    """

    def __post_init__(self) -> None:
        check_options(self, "rejection_sampling.")
        super().__post_init__()
        for name, text in self.problems():
            raise ValueError(f"rejection_sampling.{name} {text}")


@dataclass(frozen=True, slots=True)
class BehaviorWeights:
    """Importance weights relative to the behavior policy, and the result of rejection sampling."""

    weight: Tensor  # importance weight [A], detached; 0 for masked tokens
    keep: Tensor  # bool [A], response tokens that are not masked
    outside: Tensor  # bool [A], response tokens affected by the bounds: masked, or with a clamped weight


def behavior_weights(
    sampling: RejectionSampling | None, pack: DataPack, proximal: Tensor, behavior: Tensor
) -> BehaviorWeights:
    """Compute importance weights and the mask of kept tokens from the log-prob of each token under the proximal and
    the behavior policy.

    If ``sampling`` is None, the weight of each response token is pi_proximal / pi_behavior.
    """
    mask = pack["packed_response_mask"]
    # In float64, so that the decision for a sequence does not depend on the packing.
    proximal, behavior = (torch.where(mask, x.detach().double(), 0.0) for x in (proximal, behavior))
    d = (proximal - behavior).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    weight = ratio_of(d)
    if sampling is None:
        return BehaviorWeights(torch.where(mask, weight, 0.0), mask, torch.zeros_like(mask))
    values = _METRICS[sampling.metric](d, proximal, behavior)
    if sampling.level == "sequence":
        values = _aggregate(values, sampling.agg, pack)[pack["packed_seq_ids"]]
        if sampling.metric == "ratio":
            weight = ratio_of(sequence_means(d, pack))[pack["packed_seq_ids"]]
    if sampling.metric == "ratio":
        values = ratio_of(values)
    lower = -torch.inf if sampling.lower is None else sampling.lower
    outside = mask & ((values < lower) | (values > sampling.upper))
    if sampling.action == "mask":
        keep = mask & ~outside
        return BehaviorWeights(torch.where(keep, weight, 0.0), keep, outside)
    # A sequence's weight is the geometric mean, which may be within the bounds even if the sum or maximum over tokens is not.
    clamped = torch.where(outside, weight.clamp(max(lower, 0.0), sampling.upper), weight)
    return BehaviorWeights(torch.where(mask, clamped, 0.0), mask, outside & (clamped != weight))


def _aggregate(values: Tensor, agg: str, pack: DataPack) -> Tensor:
    """Aggregate over the response tokens of each sequence. The result is 0 for a sequence without response tokens."""
    mask = pack["packed_response_mask"]
    ids, values = pack["packed_seq_ids"][mask], values[mask]
    zeros = values.new_zeros(pack["packed_num_sequences"])
    if agg == "max":
        return zeros.scatter_reduce(0, ids, values, "amax", include_self=False)
    sums = zeros.index_add(0, ids, values)
    return sums if agg == "sum" else sums / zeros.index_add(0, ids, torch.ones_like(values)).clamp(min=1)


def _k3(d: Tensor, proximal: Tensor, behavior: Tensor) -> Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def _binary_kl(d: Tensor, proximal: Tensor, behavior: Tensor) -> Tensor:
    p, b = (x.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY) for x in (proximal, behavior))
    # log1p is accurate for probabilities near 1.
    heads, tails = p.log() - b.log(), torch.log1p(-p) - torch.log1p(-b)
    forward, backward = p * heads + (1 - p) * tails, -b * heads - (1 - b) * tails
    return torch.maximum(forward, backward)


# A ratio is aggregated over a sequence as its logarithm.
_METRICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ratio": lambda d, proximal, behavior: d,
    "kl_k1": lambda d, proximal, behavior: d,
    "kl_k2": lambda d, proximal, behavior: 0.5 * d.square(),
    "kl_k3": _k3,
    "binary_kl": _binary_kl,
}


def second_moment_keep(proximal: Tensor, behavior: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Select the tokens that M2PO keeps (Zheng et al. 2025, arXiv:2510.01161).

    The tokens with the largest (behavior - proximal)^2 are masked until the mean of this square over the kept tokens is
    below ``threshold``. At least one token is kept. The selection sorts all tokens of a batch, and therefore runs once,
    before the division into microbatches. The caller stores the result in the attribute ``keep`` of the training rows
    (:class:`areno.types.TrainSequence`).

    Args:
        proximal: log-probs at the start of the update [N].
        behavior: log-probs of the sampling policy [N].
        mask: response tokens [N].

    Returns:
        bool [N], True for the response tokens to keep.

    Raises:
        ValueError: the threshold is not above 0.
    """
    if not threshold > 0:
        raise ValueError(f"m2_threshold must be above 0, got {threshold}")
    moved = (in_float(behavior).double() - in_float(proximal).double())[mask].nan_to_num(
        nan=0.0, posinf=0.0, neginf=0.0
    )
    moved, order = moved.square().sort(stable=True)
    counts = torch.arange(1, len(moved) + 1, dtype=torch.float64, device=moved.device)
    keep_count = max(1, int((moved.cumsum(0) / counts < threshold).sum()))
    keep = torch.zeros_like(moved, dtype=torch.bool)
    keep[order[:keep_count]] = True
    return torch.zeros_like(mask).masked_scatter(mask, keep)
