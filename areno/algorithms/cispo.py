"""CISPO's loss (MiniMax 2025, arXiv:2506.13585).

The clipped importance ratio is a constant weight of a token's log-prob, so clipping removes no gradient.
"""

from areno.algorithms import family

SPEC = family("cispo", use_cispo_loss=True)
