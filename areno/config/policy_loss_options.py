"""The knobs of the one policy loss, for both front ends: settings of ``actor`` in an experiment, flags of ``areno train``."""

from __future__ import annotations

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
