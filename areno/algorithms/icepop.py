"""IcePop (Ling team 2025, arXiv:2510.18855): tokens whose probability has changed too far since the rollout are left out."""

from areno.config import AlgorithmSpec
from areno.loss_fns.family import PolicyLoss, policy_loss_fn

PRESETS = {"use_decoupled_loss": True, "rejection_sampling": {"lower": 0.5, "upper": 5.0}}

SPEC = AlgorithmSpec("icepop", default_loss=policy_loss_fn, options=PolicyLoss, presets=PRESETS, min_samples=2)
