"""GRPO: group-relative policy optimization with token-level importance ratios (Shao et al. 2024, arXiv:2402.03300)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from areno.loss_fns.clipping import (
    Clip,
    advantages_of,
    log_difference,
    over_sequences,
    over_tokens,
    policy_metrics,
    ratio_of,
    sequence_means,
    with_kl,
)
from areno.loss_fns.kl import reference_kl
from areno.loss_fns.loss_interface import DataPack, Reduction, reduces_over, sequence_sums
from areno.loss_fns.stats import Mean, TokenFlags


def _unit(bound: Mapping[str, Any]) -> Reduction:
    return "token" if bound.get("loss_mean", "token") == "token" else "sequence"


@reduces_over(_unit, entropy=True)
def grpo_loss_fn(
    data_pack: DataPack,
    logprobs: Tensor,
    clip_eps: float = 0.2,
    *,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    loss_mean: str = "token",
    max_tokens: int | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
) -> tuple[Tensor, dict[str, Any]]:
    """Compute L = mean over tokens of -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps_high) A_t) + kl_coef KL_t.

    The importance ratio of token t is r_t = pi(t) / pi_rollout(t). ``packed_logprobs`` contains log pi_rollout,
    recorded during the rollout. In the first optimizer step on new samples, the ratio is about 1. Clipping therefore has
    an effect only after the policy has changed. ``loss_mean`` selects how the policy term and the KL term are averaged:

    - ``token``: over all response tokens of the optimizer step (DAPO, Yu et al. 2025, arXiv:2503.14476)
    - ``sequence``: over the tokens of each sequence, then over sequences (Shao et al.)
    - ``dr_grpo``: over sequences, after the sum over each sequence is divided by the constant ``max_tokens``. The
      constant removes the length bias (Liu et al. 2025, arXiv:2503.20783).

    With ``sequence`` and ``dr_grpo``, a sequence without response tokens counts with the value 0.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_logprobs``, ``packed_advantages``, ``packed_seq_ids`` and
            ``packed_num_sequences``. A KL term also needs ``packed_ref_logprobs``.
        clip_eps: eps; the lower bound of the clip range is 1 - ``clip_eps``.
        clip_eps_high: eps_high; the upper bound of the clip range is 1 + ``clip_eps_high``. None means ``clip_eps``.
        dual_clip: upper bound on the loss where the advantage A is negative, as a multiple of abs(A). If None, the loss
            has no upper bound.
        loss_mean: ``token``, ``sequence`` or ``dr_grpo``.
        max_tokens: the divisor for ``dr_grpo``, normally the maximum response length in tokens.
        kl_coef: weight of the KL divergence to the reference policy; 0 disables the KL term.
        kl_type: KL estimator, see :func:`~areno.loss_fns.kl.kl_penalty`.

    Raises:
        ValueError: an argument is out of range, or the pack lacks a required tensor.
    """
    clip = Clip.open(clip_eps, clip_eps_high, dual_clip)
    advantage = advantages_of(data_pack)
    ratio = ratio_of(log_difference(data_pack, logprobs))
    kl = reference_kl(data_pack, logprobs, kl_coef, kl_type)
    policy = _average(clip.objective(ratio, advantage), data_pack, loss_mean, max_tokens)
    kl_mean = None if kl is None else _average(kl, data_pack, loss_mean, max_tokens)
    loss, metrics = with_kl(policy, kl_mean, kl_coef)
    metrics |= policy_metrics(data_pack, logprobs, ratio)
    metrics |= clip.fractions(ratio, advantage, data_pack["packed_response_mask"])
    metrics["clipped"] = TokenFlags(clip.removes(ratio, advantage))
    return loss, metrics


def _average(values: Tensor, pack: DataPack, loss_mean: str, max_tokens: int | None) -> Mean:
    """Average ``values`` as ``loss_mean`` specifies.

    ``values`` has one entry per token. Entries outside the response mask must be 0.
    """
    if loss_mean == "token":
        return over_tokens(values, pack)
    if loss_mean == "sequence":
        return over_sequences(sequence_means(values, pack))
    if loss_mean != "dr_grpo":
        raise ValueError(f"loss_mean {loss_mean!r} is unknown; choose one of: token, sequence, dr_grpo")
    if max_tokens is None or not max_tokens > 0:
        raise ValueError(f"loss_mean='dr_grpo' needs max_tokens above 0, got {max_tokens}")
    return over_sequences(sequence_sums(values, pack) / max_tokens)
