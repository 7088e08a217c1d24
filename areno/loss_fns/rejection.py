"""How far the policy that an update starts from lies from the one that sampled, and what to do about tokens that are too far.

r = pi_proximal / pi_behaviour of a token is the weight that makes stale samples count as fresh ones (decoupled PPO, Hilton et
al. 2022, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298). A token or sequence outside the bounds is left out of the
loss, or its weight is clamped. With a lower and an upper bound on the ratio that is IcePop (Ling Team 2025, arXiv:2510.18855).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.config.options import check_options
from areno.config.policy_loss_options import RejectionSamplingConfig
from areno.loss_fns.pack import DataPack, in_float
from areno.loss_fns.policy import MAX_LOG_RATIO, ratio_of, sequence_means

# A probability of exactly 0 or 1 has no divergence to another.
LEAST_PROBABILITY = 1e-8


@dataclass
class RejectionSampling(RejectionSamplingConfig):
    """Bounds on the divergence between the proximal and the behaviour policy.

    With d = log r the metric ``ratio`` is r; ``kl_k1`` d; ``kl_k2`` d^2 / 2; ``kl_k3`` r - log r - 1; ``binary_kl`` (KPop) the
    larger of the two divergences between the token's probabilities, each read as a coin.

    Raises:
        ValueError: a name is unknown, or a bound cannot be met.
    """

    def __post_init__(self) -> None:
        check_options(self, "rejection_sampling.")
        super().__post_init__()
        for name, text in self.problems():
            raise ValueError(f"rejection_sampling.{name} {text}")


@dataclass(frozen=True, slots=True)
class BehaviourWeights:
    """What the behaviour policy means for each token."""

    weight: Tensor  # importance weight [A], detached; 0 where a token is left out
    keep: Tensor  # bool [A], response tokens that are let through
    outside: Tensor  # bool [A], response tokens that the bounds change: left out, or with a weight that is clamped


def behaviour_weights(
    sampling: RejectionSampling | None, pack: DataPack, proximal: Tensor, behaviour: Tensor
) -> BehaviourWeights:
    """Weight of each token, and which are let through, from log-probs at the start of the update and of sampling [A].

    Without ``sampling`` each token keeps its ratio as its weight.
    """
    mask = pack["packed_response_mask"]
    # In float64: a bound must not let a sequence through in one packing and stop it in another.
    proximal, behaviour = (torch.where(mask, x.detach().double(), 0.0) for x in (proximal, behaviour))
    d = (proximal - behaviour).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    weight = ratio_of(d)
    if sampling is None:
        return BehaviourWeights(torch.where(mask, weight, 0.0), mask, torch.zeros_like(mask))
    values = _METRICS[sampling.metric](d, proximal, behaviour)
    if sampling.level == "sequence":
        values = _aggregated(values, sampling.agg, pack)[pack["packed_seq_ids"]]
        if sampling.metric == "ratio":
            weight = ratio_of(sequence_means(d, pack))[pack["packed_seq_ids"]]
    if sampling.metric == "ratio":
        values = ratio_of(values)
    lower = -torch.inf if sampling.lower is None else sampling.lower
    outside = mask & ((values < lower) | (values > sampling.upper))
    if sampling.action == "mask":
        keep = mask & ~outside
        return BehaviourWeights(torch.where(keep, weight, 0.0), keep, outside)
    # The weight is the geometric mean, which may lie within bounds that the tokens' sum or maximum leaves.
    clamped = torch.where(outside, weight.clamp(max(lower, 0.0), sampling.upper), weight)
    return BehaviourWeights(torch.where(mask, clamped, 0.0), mask, outside & (clamped != weight))


def _aggregated(values: Tensor, agg: str, pack: DataPack) -> Tensor:
    """One number per sequence [packed_num_sequences] from its response tokens; 0 where it has none."""
    mask = pack["packed_response_mask"]
    ids, kept = pack["packed_seq_ids"][mask], values[mask]
    zeros = values.new_zeros(pack["packed_num_sequences"])
    if agg == "max":
        return zeros.scatter_reduce(0, ids, kept, "amax", include_self=False)
    sums = zeros.index_add(0, ids, kept)
    return sums if agg == "sum" else sums / zeros.index_add(0, ids, torch.ones_like(kept)).clamp(min=1)


def _k3(d: Tensor, proximal: Tensor, behaviour: Tensor) -> Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def _binary_kl(d: Tensor, proximal: Tensor, behaviour: Tensor) -> Tensor:
    p, b = (x.exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY) for x in (proximal, behaviour))
    # log1p keeps the digits of a probability near 1.
    heads, tails = p.log() - b.log(), torch.log1p(-p) - torch.log1p(-b)
    forward, backward = p * heads + (1 - p) * tails, -b * heads - (1 - b) * tails
    return torch.maximum(forward, backward)


# For a ratio the value is its logarithm until the tokens of a sequence are brought together.
_METRICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ratio": lambda d, proximal, behaviour: d,
    "kl_k1": lambda d, proximal, behaviour: d,
    "kl_k2": lambda d, proximal, behaviour: 0.5 * d.square(),
    "kl_k3": _k3,
    "binary_kl": _binary_kl,
}


def second_moment_keep(proximal: Tensor, behaviour: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """M2PO: leave out the tokens that moved most, until the mean of (log pi_b - log pi_p)^2 over the rest is below a threshold.

    The choice sorts all tokens of a batch, so it is made once before the batch is cut into microbatches, and travels with
    the rows (:attr:`areno.types.TrainSequence.keep`). At least one token stays. Zheng et al. 2025, arXiv:2510.01161.

    Args:
        proximal: log-probs at the start of the update [N].
        behaviour: log-probs of the policy that sampled [N].
        mask: response tokens [N].

    Returns:
        bool [N], response tokens that stay.

    Raises:
        ValueError: the threshold is not above 0.
    """
    if not threshold > 0:
        raise ValueError(f"m2_threshold must be above 0, got {threshold}")
    moved = (in_float(behaviour).double() - in_float(proximal).double())[mask].nan_to_num(
        nan=0.0, posinf=0.0, neginf=0.0
    )
    moved, order = moved.square().sort(stable=True)
    counts = torch.arange(1, len(moved) + 1, dtype=torch.float64, device=moved.device)
    stay = max(1, int((moved.cumsum(0) / counts < threshold).sum()))
    kept = torch.zeros_like(moved, dtype=torch.bool)
    kept[order[:stay]] = True
    return torch.zeros_like(mask).masked_scatter(mask, kept)
