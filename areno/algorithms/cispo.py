"""CISPO (MiniMax 2025, arXiv:2506.13585): the clipped ratio weights the log-prob, so that every token keeps its gradient."""

from areno.algorithms import family

SPEC = family("cispo", use_cispo_loss=True)
