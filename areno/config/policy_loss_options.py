"""The knobs of the one policy loss, for both front ends: settings of ``actor`` in an experiment, flags of ``areno train``."""

from collections.abc import Iterator
from dataclasses import dataclass

from areno.config.options import option

_FORWARD_PASS = ("recompute", "metrics")


@dataclass
class PolicyLossOptions:
    """Knobs of the policy loss; [algorithms.md](algorithms.md#the-family-on-one-loss) says which make which algorithm."""

    eps_clip: float = option(0.2, minimum=0, help="The ratio is clipped to 1 - eps_clip ... 1 + eps_clip.")
    eps_clip_higher: float | None = option(None, minimum=0, help="Another upper clip: 1 + eps_clip_higher.")
    c_clip: float | None = option(None, above=1, help="Dual clip: the loss is at most c_clip * |advantage|.")
    importance_sampling_level: str = option(
        "token",
        choices=("token", "sequence"),
        help="sequence takes the geometric mean of a sequence's ratios (GSPO, whose paper has eps_clip 0.0003).",
    )
    use_sapo_loss: bool = option(False, help="SAPO: a soft gate instead of the clip.")
    sapo_tau_pos: float = option(1.0, above=0, help="SAPO's temperature for positive advantages.")
    sapo_tau_neg: float = option(1.05, above=0, help="SAPO's temperature for negative advantages.")
    use_cispo_loss: bool = option(
        False, help="CISPO: the clipped ratio weights the log-prob and carries no gradient, so no token is lost."
    )
    use_decoupled_loss: bool = option(
        False, help="Clip against the policy before the update, and weight for the one that sampled."
    )
    prox_logp_method: str = option(
        "recompute",
        choices=(*_FORWARD_PASS, "loglinear", "linear", "rollout"),
        help="Proximal log-probs of the decoupled loss: by a forward pass (metrics also reports how good the others would "
        "be), interpolated between log-probs or probabilities, or those of the rollout.",
    )
    m2_threshold: float | None = option(
        None, above=0, help="M2PO: leave out the tokens that take the mean squared log-ratio above this."
    )

    @property
    def needs_proximal(self) -> bool:
        """Whether rows must bring ``prox_logprobs``, which cost a forward pass before the update."""
        return self.use_decoupled_loss and self.prox_logp_method in _FORWARD_PASS

    def problems(self) -> Iterator[tuple[str, str]]:
        """Knobs that exclude each other or do nothing: the name, and what is wrong with the remedy."""
        if self.use_sapo_loss and self.use_cispo_loss:
            yield "use_sapo_loss", "and use_cispo_loss are two losses; leave one of the two out"
        if self.use_sapo_loss and self.use_decoupled_loss:
            yield "use_sapo_loss", "cannot be decoupled; set use_decoupled_loss to false"
        for names, because in self._idle():
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
                "compares log-probs before the update with those of rollout; set use_decoupled_loss too, with "
                f"prox_logp_method {' or '.join(_FORWARD_PASS)}",
            )

    def _idle(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Knobs that others make idle, with the reason and the remedy."""
        if self.use_sapo_loss:
            yield ("eps_clip_higher", "c_clip"), "with use_sapo_loss, which does not clip; remove it"
        else:
            yield ("sapo_tau_pos", "sapo_tau_neg"), "without SAPO; set use_sapo_loss too"
        if self.use_cispo_loss:
            yield ("c_clip",), "with use_cispo_loss, which keeps every token; leave it out"
        if not self.use_decoupled_loss:
            yield ("rejection_sampling", "prox_logp_method"), "without use_decoupled_loss; set it too"


@dataclass
class RejectionSamplingConfig:
    """Leaves out, or bounds, tokens whose proximal policy has moved away from the policy that sampled them.

    With r = proximal / behaviour probability, the importance weight of ``use_decoupled_loss``, which it needs.
    """

    level: str = option("token", choices=("token", "sequence"), help="Judge each token, or each sequence as a whole.")
    action: str = option(
        "mask",
        choices=("mask", "clamp"),
        help="mask removes what is outside the bounds from the loss; clamp keeps it with a bounded weight (ratio only).",
    )
    metric: str = option(
        "ratio",
        choices=("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"),
        help="What is compared with the bounds: r, log r, (log r)^2 / 2, r - log r - 1, or the larger of the two KL "
        "divergences between the token's Bernoulli distributions.",
    )
    agg: str = option(
        "mean",
        choices=("sum", "mean", "max"),
        help="How a sequence's tokens become one number; for ratio in log space, so that mean is the geometric mean.",
    )
    upper: float = option(5.0, help="Upper bound.")
    lower: float | None = option(None, help="Lower bound; null sets none, and is 0 with clamp.")

    def __post_init__(self) -> None:
        if self.action == "clamp" and self.lower is None:
            self.lower = 0.0

    def problems(self) -> Iterator[tuple[str, str]]:
        """Bounds that the metric can have, and actions that it allows: the name, and what is wrong with the remedy."""
        lower, upper = self.lower, self.upper
        if lower is not None and lower > upper:
            yield "lower", f"{lower} is above upper {upper}, which would leave out everything; exchange them"
        if self.metric == "ratio":
            if upper <= 1:
                yield (
                    "upper",
                    f"{upper} would leave out an unchanged policy, whose ratio is 1; give more than 1, such as 5",
                )
            if lower is not None and lower <= 0 and self.action == "mask":
                yield "lower", f"{lower} is no bound of a ratio, which is always positive; give e.g. 0.5, or null"
        elif self.action == "clamp":
            yield "action", f"clamp bounds a ratio, and metric is {self.metric}; use action mask, or metric ratio"
        if self.metric in ("kl_k2", "kl_k3", "binary_kl") and upper <= 0:
            because = f"because {self.metric} is never negative; give more than 0"
            yield "upper", f"{upper} would leave out everything, {because}"
        if self.level == "token" and self.agg != RejectionSamplingConfig.agg:
            because = "with level token, where nothing is aggregated; use level sequence"
            yield "agg", f"{self.agg} has no effect {because}"
