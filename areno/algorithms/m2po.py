"""M2PO (Zheng et al. 2025, arXiv:2510.01161): the tokens that moved most are left out until the second moment is bounded."""

from areno.config import AlgorithmSpec
from areno.loss_fns.family import PolicyLoss, policy_loss_fn

PRESETS = {"use_decoupled_loss": True, "m2_threshold": 0.04, "eps_clip": 0.0}

SPEC = AlgorithmSpec("m2po", default_loss=policy_loss_fn, options=PolicyLoss, presets=PRESETS, min_samples=2)
