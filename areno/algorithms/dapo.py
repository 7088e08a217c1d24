"""DAPO's loss (Yu et al. 2025, arXiv:2503.14476): the ratio of unlikely tokens may rise further than others may fall."""

from areno.config import AlgorithmSpec
from areno.loss_fns.family import PolicyLoss, policy_loss_fn

SPEC = AlgorithmSpec(
    "dapo",
    default_loss=policy_loss_fn,
    options=PolicyLoss,
    presets={"eps_clip_higher": 0.28},
    min_samples=2,
    uses=("kl_coef", "kl_loss_type"),
    renamed={"kl_type": "kl_loss_type"},
)
