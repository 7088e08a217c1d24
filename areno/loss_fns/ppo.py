"""PPO's policy loss: clipped token ratios with a dual clip and a KL term (Schulman et al. 2017, arXiv:1707.06347)."""

from typing import Any

from torch import Tensor

from areno.loss_fns.clipping import (
    Clip,
    advantages_of,
    log_difference,
    over_tokens,
    policy_metrics,
    ratio_of,
    with_kl,
)
from areno.loss_fns.kl import masked_kl
from areno.loss_fns.loss_interface import DataPack, reduces_over
from areno.loss_fns.stats import TokenFlags, masked_mean


@reduces_over("token", entropy=True)
def ppo_loss_fn(
    data_pack: DataPack,
    logprobs: Tensor,
    clip_eps: float = 0.2,
    *,
    clip_eps_high: float | None = None,
    clip_ratio_c: float = 3.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: str = "low_var_kl",
) -> tuple[Tensor, dict[str, Any]]:
    """Compute the mean of the clipped loss l_t over the response tokens t.

    The clipped loss is l_t = -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps_high) A_t). Where A_t < 0, l_t is at most
    clip_ratio_c abs(A_t) (dual clip, Ye et al. 2020, arXiv:1912.09729). The importance ratio is r_t = pi(t) /
    pi_old(t), and ``packed_logprobs`` contains log pi_old. With ``use_kl_loss``, the mean of kl_loss_coef KL_t is added.
    KL_t is the KL divergence to the reference policy, or to pi_old if the batch has no reference log-probs.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_logprobs``, ``packed_advantages``, ``packed_seq_ids`` and
            ``packed_num_sequences``. ``packed_ref_logprobs`` is optional.
        clip_eps: eps; the lower bound of the clip range is 1 - ``clip_eps``.
        clip_eps_high: eps_high; the upper bound of the clip range is 1 + ``clip_eps_high``. None means ``clip_eps``.
        clip_ratio_c: bound of the dual clip; must be above 1.
        use_kl_loss: whether to add the KL term.
        kl_loss_coef: weight of the KL term.
        kl_loss_type: KL estimator, see :func:`~areno.loss_fns.kl.kl_penalty`.

    Returns:
        Loss and statistics. ``pg_clipfrac`` is the fraction of tokens that the clip range clips. ``pg_clipfrac_lower``
        is the fraction of tokens that the dual clip clips. ``ppo_kl`` is the mean of log pi_old - log pi.

    Raises:
        ValueError: an argument is out of range.
    """
    if use_kl_loss and not kl_loss_coef >= 0:
        raise ValueError(f"kl_loss_coef must not be negative, got {kl_loss_coef}")
    clip = Clip.open(clip_eps, clip_eps_high, clip_ratio_c)
    mask, advantage = data_pack["packed_response_mask"], advantages_of(data_pack)
    difference = log_difference(data_pack, logprobs)
    ratio = ratio_of(difference)
    kl = None
    if use_kl_loss:
        reference = data_pack.get("packed_ref_logprobs", data_pack["packed_logprobs"])
        kl = over_tokens(masked_kl(data_pack, logprobs, reference, kl_loss_type), data_pack)
    policy = over_tokens(clip.objective(ratio, advantage), data_pack)
    loss, metrics = with_kl(policy, kl, kl_loss_coef)
    metrics |= policy_metrics(data_pack, logprobs, ratio)
    clipped = clip.is_high(ratio, advantage) | clip.is_low(ratio, advantage)
    metrics["pg_clipfrac"] = masked_mean(clipped.float(), mask)
    metrics["pg_clipfrac_lower"] = masked_mean(clip.is_dual(ratio, advantage).float(), mask)
    metrics["ppo_kl"] = masked_mean(-difference, mask)
    metrics["clipped"] = TokenFlags(clip.removes(ratio, advantage))
    return loss, metrics
