"""SAPO (Gao et al. 2025, arXiv:2511.20347): a soft gate of the importance ratio instead of clipping."""

from areno.algorithms import family

SPEC = family("sapo", use_sapo_loss=True)
