"""Options of the policy loss.

The options are flags of ``areno train``, and settings of the section ``actor`` in an experiment file (``areno run``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from areno.config.options import option

_FORWARD_PASS = ("recompute", "metrics")


@dataclass
class PolicyLossOptions:
    """Options of the policy loss, which [Algorithms](algorithms.md#algorithms-that-share-one-policy-loss) explains."""

    eps_clip: float = option(
        0.2, minimum=0, help="Clip the importance ratio to the range from 1 - eps_clip to 1 + eps_clip."
    )
    eps_clip_higher: float | None = option(
        None, minimum=0, help="Use 1 + eps_clip_higher as the upper bound of the clip range (clip-higher)."
    )
    c_clip: float | None = option(
        None,
        above=1,
        help="Dual clip: limit the loss of a token with negative advantage to c_clip times the advantage's magnitude.",
    )
    importance_sampling_level: str = option(
        "token",
        choices=("token", "sequence"),
        help="Compute the importance ratio per token or per sequence. The ratio of a sequence is the geometric "
        "mean of its token ratios (GSPO, published with eps_clip 0.0003).",
    )
    use_sapo_loss: bool = option(False, help="Use a soft gate instead of clipping (SAPO).")
    sapo_tau_pos: float = option(1.0, above=0, help="Temperature of SAPO's soft gate for positive advantages.")
    sapo_tau_neg: float = option(1.05, above=0, help="Temperature of SAPO's soft gate for negative advantages.")
    use_cispo_loss: bool = option(
        False,
        help="Weight the log-prob of each token by the clipped, detached importance ratio (CISPO). Clipped tokens "
        "keep their gradient.",
    )
    use_decoupled_loss: bool = option(
        False,
        help="Decoupled PPO loss: clip the probability ratio of current to proximal policy (the policy before the update). "
        "Weight each token by the ratio of proximal to behavior policy (which sampled the token).",
    )
    prox_logp_method: str = option(
        "recompute",
        choices=(*_FORWARD_PASS, "loglinear", "linear", "rollout"),
        help="Source of proximal log-probs: forward pass (recompute), interpolation of behavior and current policy (loglinear, "
        "linear) or rollout. metrics: recompute, and report the errors of the other methods.",
    )
    m2_threshold: float | None = option(
        None,
        above=0,
        help="Upper bound on the mean squared log-ratio of proximal to behavior policy (M2PO). areno masks the tokens with "
        "the largest squared log-ratios until the mean is below this bound.",
    )

    @property
    def needs_proximal(self) -> bool:
        """Whether rows need ``prox_logprobs``, which cost a forward pass before the update."""
        return self.use_decoupled_loss and self.prox_logp_method in _FORWARD_PASS

    def problems(self) -> Iterator[tuple[str, str]]:
        """For each option that conflicts or has no effect, yield its name and a message with the remedy."""
        if self.use_sapo_loss and self.use_cispo_loss:
            yield "use_sapo_loss", "and use_cispo_loss are mutually exclusive; use only one of them"
        if self.use_sapo_loss and self.use_decoupled_loss:
            yield "use_sapo_loss", "cannot be combined with use_decoupled_loss; set use_decoupled_loss to false"
        for names, because in self._unused():
            for name in names:
                value = getattr(self, name, None)
                if value != getattr(PolicyLossOptions, name, None):
                    yield (
                        name,
                        f"{value if isinstance(value, int | float | str) else ''} has no effect {because}".lstrip(),
                    )
        if self.m2_threshold is not None and not self.needs_proximal:
            yield (
                "m2_threshold",
                "needs proximal log-probs from a forward pass; set use_decoupled_loss to true, and prox_logp_method to "
                f"{' or '.join(_FORWARD_PASS)}",
            )

    def _unused(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield options that other options make ineffective, with the reason and the remedy."""
        if self.use_sapo_loss:
            for name in ("eps_clip_higher", "c_clip"):
                yield (name,), f"with use_sapo_loss, because SAPO does not clip; remove {name}"
        else:
            yield ("sapo_tau_pos", "sapo_tau_neg"), "without SAPO; set use_sapo_loss too"
        if self.use_cispo_loss:
            yield ("c_clip",), "with use_cispo_loss, because CISPO has no dual clip; remove c_clip"
        if not self.use_decoupled_loss:
            yield ("rejection_sampling", "prox_logp_method"), "without use_decoupled_loss; set use_decoupled_loss too"


@dataclass
class RejectionSamplingConfig:
    """Bounds on the difference between the proximal and the behavior policy. This section requires ``use_decoupled_loss``.

    Tokens outside the bounds are masked, or their weights are clamped. The importance weight r of a token is its probability
    under the proximal policy divided by its probability under the behavior policy. The setting ``metric`` determines which
    function of r is bounded.
    """

    level: str = option(
        "token", choices=("token", "sequence"), help="Apply the bounds of rejection sampling to tokens or to sequences."
    )
    action: str = option(
        "mask",
        choices=("mask", "clamp"),
        help="Exclude tokens outside the bounds from the loss (mask), or keep these tokens and clamp their weights "
        "(clamp). Use clamp only if `metric` is ratio.",
    )
    metric: str = option(
        "ratio",
        choices=("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"),
        help="Quantity that `upper` and `lower` limit: importance weight r (ratio), log r (kl_k1), (log r)^2 / 2 (kl_k2), "
        "r - log r - 1 (kl_k3), or the larger of forward and reverse Bernoulli KL (binary_kl).",
    )
    agg: str = option(
        "mean",
        choices=("sum", "mean", "max"),
        help="How the values of a sequence's tokens are combined into one value, if `level` is sequence. Ratios are "
        "aggregated in log space, so the mean of ratios is the geometric mean.",
    )
    upper: float = option(5.0, help="Upper bound of the quantity that `metric` selects.")
    lower: float | None = option(
        None,
        help="Lower bound of the quantity that `metric` selects. If `action` is clamp, the default is 0. If `action` is "
        "mask, there is no lower bound by default.",
    )

    def __post_init__(self) -> None:
        if self.action == "clamp" and self.lower is None:
            self.lower = 0.0

    def problems(self) -> Iterator[tuple[str, str]]:
        """For each invalid setting, yield its name and a message with the remedy."""
        lower, upper = self.lower, self.upper
        if lower is not None and lower > upper:
            yield "lower", f"{lower} is above upper {upper}, so everything would be rejected; swap the two bounds"
        if self.metric == "ratio":
            if upper <= 1:
                yield (
                    "upper",
                    f"{upper} would reject every increase in probability, because the ratio of an increase is above 1; use a "
                    "bound above 1, such as 5",
                )
            if lower is not None and lower <= 0 and self.action == "mask":
                yield (
                    "lower",
                    f"{lower} has no effect, because the ratio is always positive; use a lower bound such as 0.5, or null",
                )
        elif self.action == "clamp":
            yield (
                "action",
                f"clamp works only with metric=ratio, but metric is {self.metric}; set action=mask or metric=ratio",
            )
        if self.metric in ("kl_k2", "kl_k3", "binary_kl") and upper <= 0:
            yield (
                "upper",
                f"{upper} would reject every token whose probability differs between the proximal and the behavior policy, "
                f"because {self.metric} is then positive; use a bound above 0",
            )
        if self.level == "token" and self.agg != RejectionSamplingConfig.agg:
            yield (
                "agg",
                f"{self.agg} has no effect if level is token, because nothing is aggregated; set level to sequence",
            )
