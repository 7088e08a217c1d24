"""Algorithms that are one file each: knobs, loss, and ``SPEC``. The file's name is the algorithm's; nothing else lists it."""

from typing import Any

from areno.config import AlgorithmSpec
from areno.loss_fns.family import PolicyLossConfig, policy_loss_fn


def family(name: str, **presets: Any) -> AlgorithmSpec:
    """A choice of the knobs of the policy loss, all of which stay flags; ``presets`` are their defaults here."""
    return AlgorithmSpec(
        name,
        default_loss=policy_loss_fn,
        options=PolicyLossConfig,
        presets=presets,
        min_samples=2,
        uses=("kl_coef", "kl_loss_type", "ref_ckpt"),
        renamed={"kl_type": "kl_loss_type"},
    )
