"""DAPO (Yu et al. 2025, arXiv:2503.14476): PPO's clipped loss with a higher upper clip bound.

With the higher bound, an update can raise the probabilities of unlikely tokens further.
"""

from areno.algorithms import family

SPEC = family("dapo", eps_clip_higher=0.28)
