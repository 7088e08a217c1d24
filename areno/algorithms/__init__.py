"""Algorithms, each declared as ``SPEC`` in its own file. The file name is the algorithm's name.

GSPO, GRPO, PPO, SFT, DPO and reward models are declared in :mod:`areno.config.algorithms` instead.
"""

from typing import Any

from areno.config import AlgorithmSpec
from areno.loss_fns.policy_loss import PolicyLossConfig, policy_loss_fn


def family(name: str, **presets: Any) -> AlgorithmSpec:
    """Declare an algorithm with a variant of the policy loss. ``presets`` are default values of the loss's options."""
    return AlgorithmSpec(
        name,
        default_loss=policy_loss_fn,
        options=PolicyLossConfig,
        presets=presets,
        min_samples=2,
        uses=("kl_coef", "kl_loss_type", "ref_ckpt"),
        renamed={"kl_type": "kl_loss_type"},
    )
