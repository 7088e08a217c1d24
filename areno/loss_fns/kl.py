"""Estimators of the KL divergence to a reference policy, from the log-probs of sampled tokens.

Schulman, "Approximating KL divergence" (2020, http://joschu.net/blog/kl-approx.html) names three of these estimators k1,
k2 and k3. GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4) uses k3.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from areno.loss_fns.loss_interface import DataPack, in_float, required

# k3 grows exponentially; its exponent and value are bounded, so that one token cannot dominate a step.
MAX_EXPONENT = 20.0
MAX_LOW_VAR_KL = 10.0


def _low_var_kl(difference: Tensor) -> Tensor:
    exponent = (-difference).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return (torch.expm1(exponent) - exponent).clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("kl", "k1"), lambda difference: difference),
    "abs": torch.abs,
    **dict.fromkeys(("mse", "k2"), lambda difference: 0.5 * difference.square()),
    **dict.fromkeys(("low_var_kl", "k3"), _low_var_kl),
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(pi || pi_ref) at each token, elementwise, with d = log pi - log pi_ref.

    - ``kl`` (alias ``k1``): d, which is unbiased, but may be negative.
    - ``abs``: \\|d\\|.
    - ``mse`` (alias ``k2``): d^2 / 2.
    - ``low_var_kl`` (alias ``k3``): exp(-d) - 1 + d, which is never negative. Only for this kind, d is clamped to the
      range from -20 to 20, and the result to at most 10. Without these clamps, ``low_var_kl`` is unbiased.

    As loss terms, ``abs``, ``mse`` and ``low_var_kl`` pull the policy towards the reference. As a loss term, ``kl`` has
    a gradient that does not depend on the reference.

    Args:
        logprobs: log-probs of the policy, any shape.
        ref_logprobs: log-probs of the reference, same shape.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    if kind not in _ESTIMATORS:
        raise ValueError(f"KL estimator {kind!r} is unknown; choose one of: {', '.join(_ESTIMATORS)}")
    return _ESTIMATORS[kind](in_float(logprobs) - in_float(ref_logprobs))


def masked_kl(pack: DataPack, logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return the KL estimate of :func:`kl_penalty` at each token; 0 outside the response mask."""
    mask = pack["packed_response_mask"]
    return kl_penalty(torch.where(mask, logprobs, 0.0), torch.where(mask, ref_logprobs, 0.0), kind)


def reference_kl(pack: DataPack, logprobs: Tensor, coef: float, kind: str) -> Tensor | None:
    """Estimate the KL divergence to the reference policy at each token; None if the weight ``coef`` is 0.

    Raises:
        ValueError: the weight is negative, the estimator is unknown, or the pack has no reference log-probs.
    """
    if coef == 0:
        return None
    if not coef > 0:
        raise ValueError(f"kl_coef must not be negative, got {coef}; set kl_coef=0 to disable the KL term")
    reference = required(
        pack,
        "packed_ref_logprobs",
        f"a KL term with kl_coef={coef}",
        "set ref_logprobs (log-probs of the reference model) in every row, or set kl_coef=0",
    )
    return masked_kl(pack, logprobs, reference, kind)
