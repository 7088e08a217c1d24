"""The configurable policy loss of ``areno run`` and of most files in ``areno/algorithms``.

The loss covers PPO, GRPO, GSPO, DAPO, SAPO, M2PO, CISPO, decoupled PPO, rejection sampling and distillation. The
algorithms ``gspo``, ``grpo`` and ``ppo`` of ``areno train`` use separate losses.

The settings of this module and of reward shaping (:mod:`areno.loss_fns.shaping`) determine the algorithm.
docs/algorithms.md lists the settings of each algorithm. Settings have the same names as in the sections ``actor`` and
``teacher`` of an experiment.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.config.options import check_options
from areno.config.policy_loss_options import PolicyLossOptions
from areno.loss_fns.clipping import (
    Clip,
    advantages_of,
    kl_metrics,
    over_tokens,
    policy_metrics,
    ratio_of,
    sequence_means,
)
from areno.loss_fns.kl import reference_kl
from areno.loss_fns.loss_interface import DataPack, in_float, reduces_over, required
from areno.loss_fns.proximal import approximate_proximal, approximation_metrics
from areno.loss_fns.rejection import BehaviorWeights, RejectionSampling, behavior_weights
from areno.loss_fns.stats import Count, Mean, TokenFlags, masked_range


@dataclass
class PolicyLossConfig(PolicyLossOptions):
    """Picklable settings of :func:`policy_loss_fn`.

    If ``m2_threshold`` is set, the data pack must have ``packed_keep``: True for each token that M2PO keeps (see
    :func:`~areno.loss_fns.shaping.select_by_second_moment`).

    Raises:
        ValueError: a setting is out of range, contradicts another setting, or would have no effect.
    """

    rejection_sampling: RejectionSampling | None = None  # bounds on pi_proximal / pi_behavior in the decoupled loss
    rl_loss_weight: float = 1.0  # weight of the policy loss; 0: distillation only
    distill_loss_weight: float = 0.0  # weight of the reverse KL divergence to a teacher; 0 disables distillation

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("rl_loss_weight", "distill_loss_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.rl_loss_weight == 0 and self.distill_loss_weight == 0:
            raise ValueError(
                "rl_loss_weight and distill_loss_weight are both 0; set at least one of these weights above 0"
            )
        for name, text in self.problems():
            raise ValueError(f"{name} {text}")

    @property
    def clip(self) -> Clip:
        """Bounds on the importance ratio."""
        return Clip(self.eps_clip, self.eps_clip_higher, self.c_clip)

    def scalars(self) -> dict[str, float]:
        """Return the settings to report with the statistics of a step."""
        scalars = {"eps_clip": self.eps_clip, "use_dual_clip": float(self.c_clip is not None)}
        if self.c_clip is not None:
            scalars["c_clip"] = self.c_clip
        if self.rejection_sampling is not None:
            scalars["rs_upper"] = self.rejection_sampling.upper
            if self.rejection_sampling.lower is not None and self.rejection_sampling.action == "mask":
                scalars["rs_lower"] = self.rejection_sampling.lower
        return scalars


@dataclass(frozen=True, slots=True)
class _Terms:
    """Inputs of the loss and of its statistics, with one entry per token.

    Log-probs and advantages are 0 outside the response mask.

    With sequence-level importance sampling, all response tokens of a sequence have the same ``ratio`` (geometric mean) and
    ``advantage`` (arithmetic mean). The means are over those tokens of the sequence whose ``weights.keep`` is True.
    """

    mask: Tensor
    new: Tensor
    behavior: Tensor
    proximal: Tensor
    weights: BehaviorWeights
    ratio: Tensor
    advantage: Tensor


@reduces_over("token", entropy=True, bounds=True)
def policy_loss_fn(
    data_pack: DataPack,
    logprobs: Tensor,
    knobs: PolicyLossConfig | None = None,
    *,
    version: int | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
) -> tuple[Tensor, dict[str, Any]]:
    """Compute L = (rl_loss_weight / N) sum_t w_t l_t over the N response tokens t of the optimizer step.

    The ratio rho of a token is pi / pi_p (see below), and A is the advantage of the token. If
    ``importance_sampling_level`` is ``sequence``, rho is the geometric mean of pi / pi_p over the tokens of the sequence,
    and A is the mean of their advantages. Masked tokens do not count in these means. The loss l_t of a token is

    - clip: -min(rho A, clip(rho, 1 - eps_clip, 1 + eps_clip_higher) A) (Schulman et al. 2017, arXiv:1707.06347; DAPO
      arXiv:2503.14476; GSPO arXiv:2507.18071). If ``c_clip`` is set, l_t is at most -c_clip A where A < 0.
    - SAPO: -(4 / tau) sigmoid(tau (rho - 1)) A (Gao et al. 2025, arXiv:2511.20347). tau is ``sapo_tau_pos`` if A > 0
      and ``sapo_tau_neg`` if A <= 0.
    - CISPO: -sg[clip(rho, 1 - eps_clip, 1 + eps_clip_higher)] A log pi. sg stops the gradient.

    By default pi_p is the behavior policy, which sampled the tokens, and w = 1. In the decoupled loss, pi_p is the
    proximal policy and w = pi_p / pi_behavior. Optional ``rejection_sampling`` masks tokens or clamps w. If
    ``m2_threshold`` is set, M2PO masks tokens, too (see :func:`~areno.loss_fns.rejection.second_moment_keep`). For a
    masked token, w is 0. N includes masked tokens.

    Distillation adds distill_loss_weight times the mean of (pi / pi_behavior) sg[log pi - log pi_teacher] over all
    response tokens. The gradient of this score-function term is an unbiased estimate of the gradient of the per-token
    reverse KL divergence to the teacher. The KL term adds kl_coef times the KL divergence to the reference policy,
    averaged over all response tokens.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_logprobs``, ``packed_advantages``, ``packed_seq_ids`` and
            ``packed_num_sequences``. Some settings need ``packed_prox_logprobs``, ``packed_versions``, ``packed_keep``
            or ``packed_teacher_logprobs``. A KL term needs ``packed_ref_logprobs``.
        knobs: settings. None means the defaults.
        version: weight version that this update produces: the engine's version plus one. Required by approximations of
            the proximal policy.
        kl_coef: weight of the KL term; 0 disables this term.
        kl_type: KL estimator, see :func:`~areno.loss_fns.kl.kl_penalty`.

    Returns:
        Loss and statistics. docs/statistics.md describes the statistics that ``areno run`` reports, such as
        ``importance_weight``.

    Raises:
        ValueError: the pack lacks a tensor that the settings need, or ``version`` is missing.
    """
    knobs = knobs or PolicyLossConfig()
    terms = _terms(data_pack, logprobs, knobs, version)
    losses, metrics = _surrogate(terms, knobs)
    losses = losses * terms.weights.weight.to(losses.dtype) if knobs.use_decoupled_loss else losses
    losses = torch.where(terms.weights.keep, losses, 0.0)
    policy = over_tokens(losses, data_pack)
    total = knobs.rl_loss_weight * policy.total
    if knobs.distill_loss_weight:
        distillation, gap = _distillation(data_pack, terms)
        total = total + knobs.distill_loss_weight * distillation
        metrics["rkl_loss"] = masked_range(gap, terms.mask)
    kl = reference_kl(data_pack, logprobs, kl_coef, kl_type)
    if kl is not None:
        divergence = over_tokens(kl, data_pack)
        total = total + kl_coef * divergence.total
        metrics |= kl_metrics(divergence, kl_coef)
    metrics |= policy_metrics(data_pack, logprobs, terms.ratio)
    metrics |= _statistics(data_pack, terms, losses)
    metrics |= {"policy_loss": policy.detached(), "total_loss": Mean(total.detach(), policy.count)}
    if knobs.use_decoupled_loss:
        metrics |= _behavior_statistics(terms)
        if knobs.prox_logp_method == "metrics":
            versions, new_version = _versions(data_pack, version)
            metrics |= approximation_metrics(
                terms.behavior, terms.new, terms.proximal, versions, new_version, terms.mask
            )
    return total / policy.count.clamp(min=1), metrics


def _terms(pack: DataPack, logprobs: Tensor, knobs: PolicyLossConfig, version: int | None) -> _Terms:
    mask = pack["packed_response_mask"]
    new = torch.where(mask, in_float(logprobs), 0.0)
    behavior = torch.where(mask, in_float(pack["packed_logprobs"]), 0.0)
    proximal = torch.where(mask, _proximal(pack, new, behavior, knobs, version), 0.0)
    weights = behavior_weights(knobs.rejection_sampling, pack, proximal, behavior)
    if knobs.m2_threshold is not None:
        remedy = "call areno.loss_fns.shaping.select_by_second_moment, which sets `keep` in every row"
        selected = required(pack, "packed_keep", f"m2_threshold={knobs.m2_threshold}", remedy)
        weights = BehaviorWeights(weights.weight, weights.keep & selected, weights.outside)
    log_ratio, advantage = new - proximal, advantages_of(pack)
    if knobs.importance_sampling_level == "sequence":
        ids = pack["packed_seq_ids"]
        log_ratio, advantage = (
            torch.where(mask, sequence_means(x, pack, weights.keep)[ids], 0.0) for x in (log_ratio, advantage)
        )
    return _Terms(mask, new, behavior, proximal, weights, ratio_of(log_ratio), advantage)


def _proximal(pack: DataPack, new: Tensor, behavior: Tensor, knobs: PolicyLossConfig, version: int | None) -> Tensor:
    """Return the log-prob of each token under pi_p (see :func:`policy_loss_fn`)."""
    if not knobs.use_decoupled_loss:
        return behavior
    if knobs.needs_proximal:
        remedy = "set prox_logprobs (log-probs before the update) in every row, or set prox_logp_method=loglinear"
        return in_float(required(pack, "packed_prox_logprobs", "the decoupled loss", remedy))
    versions, new_version = _versions(pack, version)
    kind: Any = knobs.prox_logp_method
    return approximate_proximal(kind, behavior, new, versions, new_version)


def _versions(pack: DataPack, version: int | None) -> tuple[Tensor, int]:
    remedy = "set `versions` in every row to the weight versions that the engine recorded for the tokens"
    versions = required(pack, "packed_versions", "an approximation of the proximal policy", remedy)
    if version is None:
        raise ValueError(
            "to approximate the proximal policy, the loss needs the argument `version`, the weight version after this update; "
            "pass the engine's version plus one"
        )
    return versions, version


def _surrogate(terms: _Terms, knobs: PolicyLossConfig) -> tuple[Tensor, dict[str, Any]]:
    ratio, advantage, clip = terms.ratio, terms.advantage, knobs.clip
    if knobs.use_sapo_loss:
        return _soft_gate(terms, knobs)
    if knobs.use_cispo_loss:
        bounded = ratio.detach().clamp(clip.low, clip.high)
        clipped = bounded != ratio.detach()
        return -bounded * advantage * terms.new, _clip_statistics(terms, clipped, torch.zeros_like(clipped))
    clipped = clip.is_high(ratio, advantage) | clip.is_low(ratio, advantage)
    metrics = _clip_statistics(terms, clipped, clip.is_dual(ratio, advantage))
    metrics["clipped"] = TokenFlags(clip.removes(ratio, advantage) & terms.weights.keep)
    return clip.objective(ratio, advantage), metrics | clip.fractions(ratio, advantage, terms.weights.keep)


def _soft_gate(terms: _Terms, knobs: PolicyLossConfig) -> tuple[Tensor, dict[str, Any]]:
    positive = terms.advantage > 0
    tau = torch.where(positive, knobs.sapo_tau_pos, knobs.sapo_tau_neg).to(terms.ratio.dtype)
    gate = torch.sigmoid(tau * (terms.ratio - 1))
    scaled = 4 / tau * gate
    return -scaled * terms.advantage, {
        "sapo_soft_gate": masked_range(gate, terms.mask),
        "sapo_scaled_gate_pos": masked_range(scaled, terms.mask & positive),
        "sapo_scaled_gate_neg": masked_range(scaled, terms.mask & ~positive),
    }


def _clip_statistics(terms: _Terms, clipped: Tensor, dual: Tensor) -> dict[str, Any]:
    keep = terms.weights.keep
    clipped = clipped & keep
    return {
        "clip_ratio": masked_range(clipped.float(), keep),
        "dual_clip_ratio": masked_range(dual.float(), keep),
        "clipped_tokens": Count(clipped.sum()),
        "clipped_new_logp": masked_range(terms.new, clipped),
        "clipped_old_logp": masked_range(terms.behavior, clipped),
    }


def _distillation(pack: DataPack, terms: _Terms) -> tuple[Tensor, Tensor]:
    """Return two tensors: the distillation loss (summed over tokens), and log pi - log pi_teacher of each token."""
    remedy = "set teacher_logprobs in every row, or set distill_loss_weight=0"
    teacher = required(pack, "packed_teacher_logprobs", "distillation", remedy)
    gap = torch.where(terms.mask, terms.new.detach() - in_float(teacher), 0.0)
    ratio = ratio_of(terms.new - terms.behavior)
    return (ratio * gap).sum(), gap


def _statistics(pack: DataPack, terms: _Terms, losses: Tensor) -> dict[str, Any]:
    values = {
        "importance_weight": terms.ratio,
        "approx_kl": terms.new - terms.proximal,
        "new_logp": terms.new,
        "old_logp": terms.behavior,
        "actor_loss": losses,
    }
    if "packed_entropy" in pack:
        values["entropy"] = pack["packed_entropy"]
    if "packed_min_logits" in pack:
        values |= {"vocab_min_logits": pack["packed_min_logits"], "vocab_max_logits": pack["packed_max_logits"]}
    return {name: masked_range(value, terms.mask) for name, value in values.items()}


def _behavior_statistics(terms: _Terms) -> dict[str, Any]:
    keep, outside = terms.weights.keep, terms.weights.outside
    return {
        "behave_imp_weight": masked_range(terms.weights.weight, keep),
        "behave_approx_kl": masked_range(terms.proximal - terms.behavior, keep),
        "unclipped_behave_tokens": Count(keep.sum()),
        "rs_filtered_fraction": Mean(outside.sum(), terms.mask.sum()),
    }
