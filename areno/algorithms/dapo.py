"""DAPO's loss (Yu et al. 2025, arXiv:2503.14476): the ratio of unlikely tokens may rise further than others may fall."""

from areno.algorithms import family

SPEC = family("dapo", eps_clip_higher=0.28)
