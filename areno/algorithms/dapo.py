"""DAPO's loss (Yu et al. 2025, arXiv:2503.14476): PPO's clipped loss with a higher upper clip bound.

The higher bound lets unlikely tokens gain more probability.
"""

from areno.algorithms import family

SPEC = family("dapo", eps_clip_higher=0.28)
