"""Approximations of the proximal policy (the policy before the update) without an extra forward pass.

v_b is the version of the policy that sampled a token, and v is the version after the update. Two of the approximations
interpolate between these versions, and assume that the policy changes at a constant rate from v_b to v. The proximal policy
has version v - 1. In the interval from v_b to v, version v - 1 lies at the fraction alpha = (v - 1 - v_b) / (v - v_b).
"""

from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.clipping import ratio_of
from areno.loss_fns.loss_interface import in_float
from areno.loss_fns.stats import Range, masked_range

Approximation = Literal["loglinear", "linear", "rollout"]
APPROXIMATIONS: tuple[Approximation, ...] = ("loglinear", "linear", "rollout")


def interpolation_fraction(versions: Tensor, version: int) -> Tensor:
    """Return the interpolation weight alpha (0 to 1; see the module) of each token.

    ``versions`` has, for each token, the version of the weights that sampled the token, or a negative number for a prompt
    token. ``version`` is the version of the weights after the update. alpha is 0 for prompt tokens, for tokens sampled with
    the weights before the update (``version - 1``), and for tokens sampled with ``version`` itself, which do not occur in
    normal training.
    """
    behind = (version - versions).double()
    alpha = ((behind - 1) / torch.where(behind == 0, 1.0, behind)).clamp(0, 1)
    return torch.where((behind == 0) | (versions < 0), 0.0, alpha)


def approximate_proximal(
    kind: Approximation, behavior: Tensor, current: Tensor, versions: Tensor, version: int
) -> Tensor:
    """Approximate the log-prob of each token under the proximal policy, without gradient.

    l_b is ``behavior``, l is ``current``, and alpha is the result of :func:`interpolation_fraction`. ``kind`` selects the
    approximation:

    - ``loglinear`` interpolates log-probs: l_b + alpha (l - l_b).
    - ``linear`` interpolates probabilities.
    - ``rollout`` returns l_b.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    behavior, current = in_float(behavior.detach()), in_float(current.detach())
    if kind == "rollout":
        return behavior
    alpha = interpolation_fraction(versions, version).to(current.dtype)
    if kind == "loglinear":
        return behavior + alpha * (current - behavior)
    if kind != "linear":
        raise ValueError(f"approximate_proximal: kind {kind!r} is unknown; choose one of: {', '.join(APPROXIMATIONS)}")
    # log((1 - alpha) + alpha pi / pi_b), relative to pi_b, which is never 0.
    return behavior + torch.log1p(alpha * (ratio_of(current - behavior) - 1))


def divergences(behavior: Tensor, proximal: Tensor) -> dict[str, Tensor]:
    """Return the KL estimates k1, k2 and k3 between the behavior and the proximal policy at each token, by metric name."""
    d = behavior - proximal
    return {"kl_div_direct": d, "kl_div_taylor": 0.5 * d.square(), "kl_div_dual": torch.expm1(-d) + d}


def approximation_metrics(
    behavior: Tensor, current: Tensor, proximal: Tensor, versions: Tensor, version: int, mask: Tensor
) -> dict[str, Range]:
    """Compare each approximation of the proximal policy with the exact log-probs, over the tokens that ``mask`` selects.

    ``proximal`` contains the exact log-probs, which a forward pass computed.

    All metric names begin with ``compute_logp/``. The metrics include the exact log-probs and the metrics of
    :func:`divergences`. For each approximation, the metrics also include three quantities and their errors:

    - the approximated log-probs l of the proximal policy,
    - the importance ratio exp(l - ``behavior``),
    - the importance ratio exp(``current`` - l).

    The exact quantities, from which the errors are measured, use ``proximal`` in place of l.
    """
    behavior, current, proximal = (torch.where(mask, x.detach().double(), 0.0) for x in (behavior, current, proximal))
    d = behavior - proximal
    values = {"prox_logp_gt": proximal, **divergences(behavior, proximal)}
    exact = {"behave_imp_weight": ratio_of(-d), "importance_weight": ratio_of(current - proximal)}
    for kind in APPROXIMATIONS:
        approx = approximate_proximal(kind, behavior, current, versions, version)
        ratios = {"behave_imp_weight": ratio_of(approx - behavior), "importance_weight": ratio_of(current - approx)}
        error = (approx - proximal).abs()
        metrics = {
            "approx_logp": approx,
            **ratios,
            "abs_error": error,
            "rel_error": _relative(error, proximal),
            "squared_error": error.square(),
        }
        for name, ratio in ratios.items():
            error = (ratio - exact[name]).abs()
            metrics |= {f"{name}_abs_error": error, f"{name}_rel_error": _relative(error, exact[name])}
        values |= {f"{kind}/{name}": value for name, value in metrics.items()}
    return {f"compute_logp/{name}": masked_range(value, mask) for name, value in values.items()}


def _relative(error: Tensor, exact: Tensor) -> Tensor:
    return error / exact.abs().clamp(min=1e-8)
