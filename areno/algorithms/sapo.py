"""SAPO (Gao et al. 2025, arXiv:2511.20347): a soft gate in place of the clip."""

from areno.config import AlgorithmSpec
from areno.loss_fns.family import PolicyLoss, policy_loss_fn

SPEC = AlgorithmSpec(
    "sapo",
    default_loss=policy_loss_fn,
    options=PolicyLoss,
    presets={"use_sapo_loss": True},
    min_samples=2,
    uses=("kl_coef", "kl_loss_type"),
    renamed={"kl_type": "kl_loss_type"},
)
