"""Sampling: one batched pass for rows with different parameters, reproducible row by row.

Each token draws one uniform number from a counter-based generator, keyed by the sample's seed and the token's index, and
inverts the cumulative distribution. What a sample says therefore depends on its seed alone: not on the batch around it,
on a preemption in between, or on how often the process was restarted. The vocabulary is sorted only for top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.engine.model.causal_lm import scale_logits
from areno.engine.rollout.counter_rng import uniforms
from areno.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """Result of one sampling pass over B rows.

    Attributes:
        tokens: chosen ids [B].
        logprobs: their log-probs under the temperature-scaled, unfiltered policy [B].
        cut_mass: probability that top-k and top-p removed [B]; None where no row filters.
    """

    tokens: Tensor
    logprobs: Tensor
    cut_mass: Tensor | None


class SamplingTable:
    """Parameters of the rows of a batch as tensors; rebuilt when rows join or leave, not per token.

    Args:
        params: one entry per row.
        seeds: one seed per row.
        device: where the logits will be.
    """

    def __init__(self, params: Seq[SamplingParams], seeds: Seq[int], device: torch.device | str = "cpu") -> None:
        self.seeds = list(seeds)
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        self.temperatures = torch.tensor(temperatures, device=device)
        self.greedy = torch.tensor([p.greedy for p in params], device=device)
        self.all_greedy = all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        filters = [i for i, p in enumerate(params) if not p.greedy and (p.top_k > 0 or p.top_p < 1)]
        self.filtered = torch.tensor(filters, dtype=torch.long, device=device)
        self.top_k = torch.tensor([params[i].top_k for i in filters], device=device)
        self.top_p = torch.tensor([params[i].top_p for i in filters], dtype=torch.float64, device=device)

    def draw(self, logits: Tensor, counters: Seq[int]) -> Draw:
        """Sample one token per row from logits [B, V]; ``counters`` is each row's index of the token to come."""
        scaled = scale_logits(logits, self.temperatures)
        normaliser = scaled.logsumexp(-1)
        cut = None
        if self.all_greedy:
            tokens = scaled.argmax(-1)
        else:
            probabilities = (scaled - normaliser[:, None]).exp()
            if len(self.filtered):
                cut = self._filter(probabilities)
            tokens = _invert_cdf(probabilities, uniforms(self.seeds, counters))
            if self.any_greedy:
                tokens = torch.where(self.greedy, scaled.argmax(-1), tokens)
        logprobs = scaled.gather(-1, tokens[:, None])[:, 0] - normaliser
        return Draw(tokens, logprobs, cut)

    def _filter(self, probabilities: Tensor) -> Tensor:
        """Zero what top-k, then top-p remove, in place; returns the removed mass of every row."""
        rows = probabilities[self.filtered]
        ordered, index = torch.sort(rows, dim=-1, descending=True, stable=True)
        rank = torch.arange(rows.shape[1], device=rows.device)[None, :]
        limit = torch.where(self.top_k > 0, self.top_k, rows.shape[1])[:, None]
        ordered = ordered.masked_fill(rank >= limit, 0.0)
        # Nucleus of what top-k left: the smallest prefix that reaches p, so a token stays while the mass before it is below p.
        mass = ordered.double().cumsum(-1)
        before = mass - ordered
        keep = (before < self.top_p[:, None] * mass[:, -1:]) | (self.top_p[:, None] >= 1.0)
        ordered = torch.where(keep, ordered, 0.0)
        probabilities[self.filtered] = torch.zeros_like(rows).scatter_(-1, index, ordered)
        cut = torch.zeros(len(probabilities), device=rows.device)
        cut[self.filtered] = (1.0 - ordered.sum(-1)).clamp(min=0.0)
        return cut


def _invert_cdf(weights: Tensor, u: np.ndarray) -> Tensor:
    """Index [B] at which the running sum of weights [B, V] first exceeds u [B] times its total."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    target = torch.from_numpy(u).to(weights.device)[:, None] * total
    below_total = torch.nextafter(total, torch.zeros_like(total))
    found = torch.searchsorted(cdf, torch.minimum(target, below_total), right=True)[:, 0]
    return found.clamp(max=weights.shape[-1] - 1)  # a row of NaN finds nothing; its log-prob then reports it
