"""CISPO (MiniMax 2025, arXiv:2506.13585): a loss in which clipped tokens keep their gradient.

The clipped importance ratio is a detached weight of the token's log-prob, so clipping removes no gradient.
"""

from areno.algorithms import family

SPEC = family("cispo", use_cispo_loss=True)
