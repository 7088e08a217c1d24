"""DAPO's loss (Yu et al. 2025, arXiv:2503.14476): a higher upper clip bound, so that unlikely tokens can gain probability."""

from areno.algorithms import family

SPEC = family("dapo", eps_clip_higher=0.28)
