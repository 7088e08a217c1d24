"""CISPO (MiniMax 2025, arXiv:2506.13585): the clipped ratio weighs the log-prob, so that no token loses its gradient."""

from areno.config import AlgorithmSpec
from areno.loss_fns.family import PolicyLoss, policy_loss_fn

SPEC = AlgorithmSpec(
    "cispo",
    default_loss=policy_loss_fn,
    options=PolicyLoss,
    presets={"use_cispo_loss": True},
    min_samples=2,
    uses=("kl_coef", "kl_loss_type"),
    renamed={"kl_type": "kl_loss_type"},
)
