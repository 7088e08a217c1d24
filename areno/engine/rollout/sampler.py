"""Sample tokens for a batch of rows with different sampling parameters. The tokens of a row do not depend on the other
rows.

Each token is found by inverting the cumulative distribution at a uniform random number. A counter-based generator computes the
random number from the sample's seed and the token's index. The random numbers of a sample therefore do not depend on the other
rows of the batch, on preemptions, or on restarts.

A row is plain if it needs only temperature sampling or greedy decoding. If all rows are plain, a decode step may sample without
this module, with the same result up to rounding. See ``plain_draw`` in :mod:`areno.engine.rollout.compiled.traced` and
:mod:`areno.engine.kernels.plain_draw`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from areno.engine.model.token_logprobs import scale_logits
from areno.engine.rollout import inverse_cdf
from areno.engine.rollout.counter_rng import uniforms
from areno.engine.rollout.filters import Filters
from areno.engine.rollout.logit_edits import LogitEdits
from areno.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """The result of sampling one token for each of B rows."""

    tokens: Tensor  # chosen ids [B]
    logprobs: Tensor  # their log-probs under the temperature-scaled policy, before filters and edits [B]
    cut_mass: Tensor | None  # probability removed by top-k, top-p and min-p [B]; None if no row has filters
    top: tuple[Tensor, Tensor] | None = None  # most likely tokens and their log-probs [B, K]; None if not requested

    def rows(self, rows: Seq[int]) -> Draw:
        """Return a :class:`Draw` that contains only the given rows."""
        index = torch.tensor(rows, device=self.tokens.device)
        cut = None if self.cut_mass is None else self.cut_mass[index]
        top = None if self.top is None else (self.top[0][index], self.top[1][index])
        return Draw(self.tokens[index], self.logprobs[index], cut, top)

    def top_lists(self, counts: Seq[int]) -> list[list[tuple[int, float]] | None]:
        """Return the ``counts[i]`` most likely tokens of each row ``i``, with log-probs; None for a row whose count is 0."""
        if self.top is None:
            return [None] * len(counts)
        tokens, values = self.top[0].tolist(), self.top[1].tolist()
        return [
            list(zip(ids[:n], logprobs[:n], strict=True)) if n else None
            for ids, logprobs, n in zip(tokens, values, counts, strict=True)
        ]


class SamplingTable:
    """The sampling parameters of a batch as tensors, which stay valid until rows join or leave the batch."""

    def __init__(
        self,
        params: Seq[SamplingParams],
        seeds: Seq[int],
        device: torch.device | str = "cpu",
        edits: Seq[LogitEdits | None] | None = None,
    ) -> None:
        self.seeds = list(seeds)
        temperatures = [p.logprob_temperature for p in params]
        self.temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.scales = any(value != 1.0 for value in temperatures)
        self.greedy = torch.tensor([p.greedy for p in params], device=device)
        self.all_greedy = all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        self.edits = [(row, edit) for row, edit in enumerate(edits or []) if edit is not None]
        rows = [i for i, p in enumerate(params) if Filters.applies_to(p)]
        self.filtered = torch.tensor(rows, dtype=torch.long, device=device)
        self.filters = Filters([params[i] for i in rows], device) if rows else None
        self.most_top = max((p.top_logprobs for p in params), default=0)
        self._weights: Tensor | None = None
        self._padded: tuple[Tensor, Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Whether no row needs filters, logit edits or top log-probs."""
        return not (self.edits or self.filters or self.most_top)

    def padded(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the temperatures and the greedy flags, each padded to [rows]."""
        if self._padded is None or len(self._padded[0]) != rows:
            more = (0, rows - len(self.temperatures))
            self._padded = (pad(self.temperatures, more, value=1.0), pad(self.greedy, more, value=True))
        return self._padded

    def draw(self, logits: Tensor, counters: Seq[int]) -> Draw:
        """Sample one token per row from the logits [B, V]. ``counters`` holds the number of earlier output tokens per row."""
        scaled = scale_logits(logits, self.temperatures) if self.scales else logits.float()
        highest = scaled.amax(-1)
        weights = self._weight_buffer(scaled)
        flat = weights.view(len(scaled), -1)[:, : scaled.shape[1]]
        torch.exp(scaled - highest[:, None], out=flat)
        sums = weights.sum(-1).double()
        normalizer = highest + sums.sum(-1).log().to(highest.dtype)
        cut = None
        if self.edits or self.filters is not None:
            self._edit(logits, flat)
            before = weights.sum((-1, -2)).double() if self.edits else sums.sum(-1)
            if self.filters is not None:
                flat[self.filtered] = self.filters.apply(flat[self.filtered])
            sums = weights.sum(-1).double()
            cut = (1.0 - sums.sum(-1) / before).clamp(min=0.0) if self.filters is not None else None
        tokens = self._choose(scaled, flat, weights, sums, counters)
        logprobs = scaled.gather(-1, tokens[:, None])[:, 0] - normalizer
        return Draw(tokens, logprobs, cut, self._top(scaled, normalizer))

    def _weight_buffer(self, scaled: Tensor) -> Tensor:
        """Return a buffer [B, blocks, size] for unnormalized probabilities.

        The vocabulary is divided into blocks of ``size`` tokens; see :mod:`inverse_cdf`. Entries beyond the vocabulary stay 0.
        """
        rows, vocab = scaled.shape
        size = inverse_cdf.block_size(vocab)
        blocks = -(-vocab // size)
        if self._weights is None or self._weights.shape != (rows, blocks, size):
            self._weights = scaled.new_zeros(rows, blocks, size)
        return self._weights

    def _edit(self, logits: Tensor, weights: Tensor) -> None:
        for row, edit in self.edits:
            edited = edit.apply(logits[row]) / self.temperatures[row]
            torch.exp(edited - edited.max(), out=weights[row])

    def _choose(self, scaled: Tensor, flat: Tensor, weights: Tensor, sums: Tensor, counters: Seq[int]) -> Tensor:
        if not self.all_greedy:
            u = torch.from_numpy(uniforms(self.seeds, counters)).to(scaled.device)
            tokens = inverse_cdf.draw(weights, sums, u).clamp(max=scaled.shape[1] - 1)
            if not self.any_greedy:
                return tokens
        best = scaled.argmax(-1)
        for row, _ in self.edits:
            best[row] = flat[row].argmax()
        return best if self.all_greedy else torch.where(self.greedy, best, tokens)

    def _top(self, scaled: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.most_top:
            return None
        values, tokens = torch.topk(scaled, min(self.most_top, scaled.shape[1]), dim=-1)
        return tokens, values - normalizer[:, None]
