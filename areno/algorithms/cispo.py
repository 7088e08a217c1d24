"""CISPO (MiniMax 2025, arXiv:2506.13585): the clipped ratio weighs the log-prob, so that no token loses its gradient."""

from areno.algorithms import family

SPEC = family("cispo", use_cispo_loss=True)
