"""IcePop (Ling team 2025, arXiv:2510.18855): tokens whose probability has changed too far since the rollout are left out."""

from areno.algorithms import family

SPEC = family("icepop", use_decoupled_loss=True, rejection_sampling={"lower": 0.5, "upper": 5.0})
