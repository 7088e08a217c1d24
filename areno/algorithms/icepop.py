"""IcePop (Ling team 2025, arXiv:2510.18855): masks tokens whose importance ratio is out of bounds."""

from areno.algorithms import family

SPEC = family("icepop", use_decoupled_loss=True, rejection_sampling={"lower": 0.5, "upper": 5.0})
