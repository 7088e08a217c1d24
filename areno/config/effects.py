"""Which options have no effect in a given run, and why: an explicit one is an error, and none is stored."""

from __future__ import annotations

from areno.config.algorithms import AlgorithmSpec, list_algorithms
from areno.config.options import Option, options_of
from areno.config.train_options import TrainOptions


def later_text(entry: Option, value: object) -> str:
    """Say what to do instead of an option that is not in this version; empty if ``value`` works."""
    info = entry.info
    if not info.later or (info.later_above is not None and isinstance(value, int) and value <= info.later_above):
        return ""
    return info.later


def without_effect(options: TrainOptions, spec: AlgorithmSpec) -> dict[str, str]:
    """Return the options that this run would not read, each with the reason and the remedy."""
    reasons = {}
    for entry in options_of(TrainOptions):
        info = entry.info
        if info.algorithms and spec.name not in info.algorithms and entry.name not in spec.uses:
            reasons[entry.name] = (
                f"applies to --algo {' and '.join(info.algorithms)} only, not to {spec.name}; leave it out"
            )
        elif info.rollout_only and not spec.requires_rollout:
            rollout = ", ".join(name for name in list_algorithms() if name != spec.name)
            reasons[entry.name] = (
                f"has no effect with --algo {spec.name}, which generates nothing; leave it out (it is for {rollout})"
            )
    if options.greedy:
        for name in ("temperature", "top_k", "top_p"):
            reasons.setdefault(name, "has no effect with --greedy; leave one of the two out")
    if options.lr_decay_style == "constant":
        for name in ("min_lr", "lr_decay_steps"):
            reasons[name] = "has no effect with --lr-decay-style constant; leave one of the two out"
    return reasons
