"""Top-k, top-p and min-p filters on rows of unnormalized token probabilities (weights), usually without sorting the vocabulary.

Top-k keeps the k largest weights of a row. Top-p keeps the nucleus: the smallest set of tokens whose total weight is at least p
times the total weight of the tokens that top-k keeps. The search for the nucleus first covers only the few hundred largest
weights. If a filter keeps only some of several tokens with equal weights, it keeps those with the lowest ids. The result of a
row therefore does not depend on the other rows of the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areno.types import SamplingParams

# Number of largest weights to search for the nucleus first; if they do not suffice, all weights are sorted.
FIRST_CANDIDATES = 256


class Filters:
    """Applies top-k, top-p and min-p to a batch of rows. ``params`` has the sampling parameters of each row."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str) -> None:
        self._top_k = [p.top_k for p in params]
        self._largest_k = max(self._top_k)
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        self._min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        self._any_nucleus = any(p.top_p < 1 for p in params)
        self._any_rank = self._any_nucleus or self._largest_k > 0
        self._any_floor = any(p.min_p > 0 for p in params)

    @staticmethod
    def applies_to(params: SamplingParams) -> bool:
        """Return whether sampling with these parameters needs a filter."""
        return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    def apply(self, weights: Tensor) -> Tensor:
        """Return ``weights`` [rows, vocabulary size], with 0 for the tokens that the filters remove."""
        kept = self._keep_largest(weights) if self._any_rank else weights
        if self._any_floor:
            kept = torch.where(weights < self._min_p[:, None] * weights.amax(-1, keepdim=True), 0.0, kept)
        return kept

    def _keep_largest(self, weights: Tensor) -> Tensor:
        vocab = weights.shape[1]
        limits = torch.tensor([k if 0 < k < vocab else vocab for k in self._top_k], device=weights.device)
        candidates = min(vocab, max(FIRST_CANDIDATES, self._largest_k))
        while True:
            values = torch.topk(weights, candidates, dim=-1).values
            count = self._nucleus(values, weights, limits) if self._any_nucleus else limits
            everything = count >= vocab
            if bool((everything | (count <= candidates)).all()):
                break
            candidates = vocab
        border = values.gather(1, (count.clamp(1, candidates) - 1)[:, None])  # the count is 0 if a weight is NaN
        above, equal = weights > border, weights == border
        room = count[:, None] - above.sum(-1, keepdim=True)
        keep = everything[:, None] | above | (equal & (equal.cumsum(-1) <= room))
        return torch.where(keep, weights, 0.0)

    def _nucleus(self, values: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
        """Return the size of each row's nucleus [R]."""
        rank = torch.arange(values.shape[1], device=values.device)[None, :]
        mass = torch.where(rank < limits[:, None], values, 0.0).double().cumsum(-1)
        full_mass = weights.double().sum(-1)
        total = torch.where(limits <= values.shape[1], mass[:, -1], full_mass)
        before = mass - values
        inside = (before < (self._top_p * total)[:, None]) & (rank < limits[:, None])
        count = inside.sum(-1)
        # If all candidates are in the nucleus, it may extend beyond them: a count above their number requests a wider search.
        open_end = (count == values.shape[1]) & (limits > values.shape[1])
        count = torch.where(open_end, values.shape[1] + 1, count)
        return torch.where(self._top_p < 1, count, limits)
