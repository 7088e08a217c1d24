"""Attention plans for a paged cache. The results equal those of the plans in :mod:`~areno.engine.rollout.slot_cache`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from areno.engine.model.attention import Forward, LayerAttention
from areno.engine.model.recurrent import SCRATCH
from areno.engine.model.varlen import find_kernel
from areno.engine.rollout.paged.backends import paged_attention
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.slot_cache import ROW_STEP, PrefillPlan, PrefillSpan


class PagedPrefillPlan(PrefillPlan):
    """Attention plan of a prefill into a paged cache; see :class:`PrefillPlan`.

    Several samples may share one context. A context is stored once, in the pages of one sample. :meth:`finish` lets the other
    samples of the context share these pages.
    """

    cache: PagedCache  # type: ignore[assignment]

    def __init__(self, cache: PagedCache, spans: Seq[PrefillSpan]) -> None:
        super().__init__(cache, spans)  # type: ignore[arg-type]

    def _place(self) -> None:
        cache, spans = self.cache, self.spans
        for span in spans:
            for slot in span.slots[1:] if span.offset else span.slots:
                cache.cut(slot, span.offset)
            cache.extend(span.slots[0], span.offset, span.offset + span.length)
        cache.publish()
        self._cells = cache.cells(self._per_token([span.slots[0] for span in spans]), self.position_ids)
        self._stops = [span.offset + span.length for span in spans]

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.cache.write(layer, self._cells, k, v)

    def _attend_cached(self, layer: LayerAttention, q: Tensor) -> Tensor:
        keys, values = (pool.flatten(0, 1)[self._context_cells] for pool in self.cache.pool(layer.layer))
        kernel = find_kernel(layer, q, values)
        if kernel is not None:
            starts = torch.tensor([0, *accumulate(self._stops)], dtype=torch.int32, device=self.device)
            longest = (max(self.lengths), max(self._stops))
            return kernel.attend(q, keys, values, (self.boundaries, starts), longest, layer)
        k, v = ([x.transpose(0, 1)[None] for x in packed.split(self._stops)] for packed in (keys, values))
        return self._attend_pieces(layer, q, list(zip(k, v, strict=True)))

    @cached_property
    def _context_cells(self) -> Tensor:
        cells = []
        for span, stop in zip(self.spans, self._stops, strict=True):
            position = torch.arange(stop, device=self.device)
            cells.append(self.cache.cells(torch.full_like(position, span.slots[0]), position))
        return torch.cat(cells)

    def finish(self) -> None:
        """After the forward pass, share the results among the samples with the same context.

        The forward pass has stored keys, values and recurrent states only for the first sample of each context. The other
        samples get references to the pages, and copies of the recurrent states.
        """
        for span in self.spans:
            self.cache.link(span.slots[0], span.slots[1:])
        super().finish()


class PagedDecodePlan:
    """A decode step with one new token per row. Row i of the step uses row i of the block table.

    The plan does not allocate the pages for the new tokens, so call :func:`open_cells` first. The computation depends only on
    tensors, so a captured CUDA graph can be replayed after new positions are written to the same tensor.

    Args:
        cache: the KV cache.
        positions: position of each row's new token [rows]; -1 for padding rows, which write to the reserved page 0.
        columns: number of token positions to attend to, greater than every entry of ``positions``.
    """

    def __init__(self, cache: PagedCache, positions: Tensor, columns: int) -> None:
        row = torch.arange(len(positions), device=positions.device)
        self.cache, self.columns, self._positions = cache, columns, positions
        self.position_ids = positions.clamp(min=0)
        self._cells = cache.cells(row, positions)
        self._table = cache.table[: len(positions)]
        self._state_rows = torch.where(positions >= 0, row, cache.slots + row % SCRATCH)
        self.routing = cache.recording(self._write)

    @classmethod
    def of(cls, cache: PagedCache, positions: Seq[int], columns: int) -> PagedDecodePlan:
        """Allocate cache space for the token at ``positions[i]`` of row i, for each i, and return the plan of the step.

        The plan is padded to a multiple of :data:`ROW_STEP` rows.
        """
        open_cells(cache, positions)
        padding = [-1] * (-len(positions) % ROW_STEP)
        return cls(cache, torch.tensor([*positions, *padding], device=cache.device), columns)

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys ``k`` and values ``v`` [rows, heads, size] to the pages, and compute attention over the pages."""
        self._write(layer.layer, k, v)
        keys, values = self.cache.pool(layer.layer)
        return paged_attention(layer, q, keys, values, self._table, self._positions, self.columns)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.cache.write(layer, self._cells, k, v)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run one step of a recurrent layer for all rows."""
        return forward(hidden[:, None], cache_params=self.cache.states.at(module, self._state_rows))[:, 0]


def open_cells(cache: PagedCache, positions: Seq[int]) -> None:
    """Allocate cache space for the token at ``positions[i]`` of row i, for each i. A position of -1 skips the row.

    If the token's page is shared with other rows, the row first gets its own copy of the page.
    """
    for row, position in enumerate(positions):
        if position >= 0:
            cache.extend(row, position, position + 1)
    cache.publish()
