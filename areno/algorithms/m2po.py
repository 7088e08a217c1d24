"""M2PO (Zheng et al. 2025, arXiv:2510.01161): masks tokens to bound the mean square of the log-ratios."""

from areno.algorithms import family

SPEC = family("m2po", use_decoupled_loss=True, m2_threshold=0.04, eps_clip=0.0)
