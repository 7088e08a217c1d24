"""The proximal policy, the one that an update starts from, without a forward pass of its own.

Between the version v_b that sampled a token and the version v that the update makes, the policy is taken to have moved evenly;
the proximal one has version v - 1 and lies alpha = (v - 1 - v_b) / (v - v_b) of the way.
"""

from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.pack import in_float
from areno.loss_fns.policy import ratio_of
from areno.loss_fns.stats import Range, masked_range

Approximation = Literal["loglinear", "linear", "rollout"]
APPROXIMATIONS: tuple[Approximation, ...] = ("loglinear", "linear", "rollout")


def travelled(versions: Tensor, version: int) -> Tensor:
    """alpha of each token [A], 0 to 1, from the versions that made them to ``version``, which the update makes.

    0 for tokens of this very version, and for prompt tokens (a version below 0).
    """
    behind = (version - versions).double()
    alpha = ((behind - 1) / torch.where(behind == 0, 1.0, behind)).clamp(0, 1)
    return torch.where((behind == 0) | (versions < 0), 0.0, alpha)


def approximate_proximal(
    kind: Approximation, behaviour: Tensor, current: Tensor, versions: Tensor, version: int
) -> Tensor:
    """Log-probs of the proximal policy [A], without gradient; see :func:`travelled` for the versions.

    ``loglinear`` moves log-probs, l_b + alpha (l - l_b); ``linear`` moves probabilities; ``rollout`` is l_b. Another kind is a
    ``ValueError``.
    """
    behaviour, current = in_float(behaviour.detach()), in_float(current.detach())
    if kind == "rollout":
        return behaviour
    alpha = travelled(versions, version).to(current.dtype)
    if kind == "loglinear":
        return behaviour + alpha * (current - behaviour)
    if kind != "linear":
        raise ValueError(f"proximal approximation {kind!r} is unknown; choose one of: {', '.join(APPROXIMATIONS)}")
    # Relative to pi_b, which is never 0: log((1 - alpha) + alpha pi / pi_b).
    return behaviour + torch.log1p(alpha * (ratio_of(current - behaviour) - 1))


def divergences(behaviour: Tensor, proximal: Tensor) -> dict[str, Tensor]:
    """k1, k2 and k3 between the behaviour and the proximal policy at each token, by documented name."""
    d = behaviour - proximal
    return {"kl_div_direct": d, "kl_div_taylor": 0.5 * d.square(), "kl_div_dual": torch.expm1(-d) + d}


def approximation_metrics(
    behaviour: Tensor, current: Tensor, proximal: Tensor, versions: Tensor, version: int, mask: Tensor
) -> dict[str, Range]:
    """How well each approximation meets the proximal log-probs that a forward pass found, over the tokens of ``mask``.

    Names are ``compute_logp/...``. Beside :func:`divergences`, errors are those of the log-prob and of the two ratios that it
    takes part in.
    """
    behaviour, current, proximal = (torch.where(mask, x.detach().double(), 0.0) for x in (behaviour, current, proximal))
    d = behaviour - proximal
    values = {"prox_logp_gt": proximal, **divergences(behaviour, proximal)}
    exact = {"behave_imp_weight": ratio_of(-d), "importance_weight": ratio_of(current - proximal)}
    for kind in APPROXIMATIONS:
        guess = approximate_proximal(kind, behaviour, current, versions, version)
        ratios = {"behave_imp_weight": ratio_of(guess - behaviour), "importance_weight": ratio_of(current - guess)}
        error = (guess - proximal).abs()
        found = {
            "approx_logp": guess,
            **ratios,
            "abs_error": error,
            "rel_error": _relative(error, proximal),
            "squared_error": error.square(),
        }
        for name, ratio in ratios.items():
            error = (ratio - exact[name]).abs()
            found |= {f"{name}_abs_error": error, f"{name}_rel_error": _relative(error, exact[name])}
        values |= {f"{kind}/{name}": value for name, value in found.items()}
    return {f"compute_logp/{name}": masked_range(value, mask) for name, value in values.items()}


def _relative(error: Tensor, to: Tensor) -> Tensor:
    """Error as a share of what it is an error of; a share of 1e-8 where that is nearly 0."""
    return error / to.abs().clamp(min=1e-8)
