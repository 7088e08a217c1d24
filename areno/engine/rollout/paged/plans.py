"""Attention plans over a paged cache: the counterparts of those over slots, with the same outcome."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor, nn

from areno.engine.model.attention import LayerAttention, scaled_dot_product, window_mask
from areno.engine.model.packing import PackedPlan
from areno.engine.model.recurrent import SCRATCH, Forward
from areno.engine.model.varlen import VarlenKernel, find_kernel
from areno.engine.rollout.kv_cache import Span
from areno.engine.rollout.paged.backends import paged_attention
from areno.engine.rollout.paged.cache import PagedCache


class PagedPrefillPlan(PackedPlan):
    """Packed pieces of contexts. Each is cached once; :meth:`finish` lets all slots that share it refer to its pages.

    Args:
        cache: where they go; it must hold what stands before each piece.
        spans: the pieces, in packed order.
    """

    def __init__(self, cache: PagedCache, spans: Seq[Span]) -> None:
        super().__init__([span.length for span in spans], cache.device)
        self.cache, self.spans = cache, spans
        for span in spans:
            for slot in span.slots[1:] if span.offset else span.slots:
                cache.cut(slot, span.offset)
            cache.extend(span.slots[0], span.offset, span.offset + span.length)
        cache.publish()
        offsets = self._repeat([span.offset for span in spans])
        self.position_ids = self.position_ids + offsets
        self._cells = cache.cells(self._repeat([span.slots[0] for span in spans]), self.position_ids)
        self._continued = any(span.offset for span in spans)
        self._masks_of: dict[tuple[int, int | None], Tensor] = {}
        self._context_cells: Tensor | None = None
        fresh = [slot for span in spans if not span.offset for slot in span.slots]
        if fresh and cache.states.tensors():
            cache.states.clear(torch.tensor(fresh, device=cache.device))

    def _repeat(self, values: list[int]) -> Tensor:
        """One value per span -> one per token."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self.lengths)).to(self.device)

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write to the pages, then attend inside each context."""
        self.cache.write(layer.layer, self._cells, k, v)
        if not self._continued:
            return super().attend(layer, q, k, v)
        keys, values = (pool.flatten(0, 1)[self._contexts()] for pool in self.cache.pool(layer.layer))
        kernel = find_kernel(layer, q, v)
        if kernel is not None:
            return self._attend_packed(kernel, layer, q, keys, values)
        stops = [span.offset + span.length for span in self.spans]
        pieces = zip(self.spans, q.split(self.lengths), keys.split(stops), values.split(stops), strict=True)
        return torch.cat([self._attend_piece(layer, *piece) for piece in pieces])

    def _contexts(self) -> Tensor:
        """Cells of all contexts up to the end of their pieces, one after the other."""
        if self._context_cells is None:
            cells = []
            for span in self.spans:
                position = torch.arange(span.offset + span.length, device=self.device)
                cells.append(self.cache.cells(torch.full_like(position, span.slots[0]), position))
            self._context_cells = torch.cat(cells)
        return self._context_cells

    def _attend_packed(self, kernel: VarlenKernel, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stops = [span.offset + span.length for span in self.spans]
        keys = torch.tensor([0, *accumulate(stops)], dtype=torch.int32, device=self.device)
        return kernel.attend(q, k, v, (self.boundaries, keys), (max(self.lengths), max(stops)), layer)

    def _attend_piece(self, layer: LayerAttention, span: Span, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = [x.transpose(0, 1)[None] for x in (q, k, v)]
        key = (self.spans.index(span), layer.window)
        if key not in self._masks_of:
            self._masks_of[key] = window_mask(span.offset + span.length, layer.window, q, span.offset)
        return scaled_dot_product(own[0], own[1], own[2], layer, self._masks_of[key])[0].transpose(0, 1)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """One context at a time: a state that is kept must not see padding."""
        outputs = []
        for span, piece in zip(self.spans, hidden.split(self.lengths), strict=True):
            states = self.cache.states.at(module, torch.tensor([span.slots[0]], device=self.device))
            outputs.append(forward(piece[None], cache_params=states)[0])
        return torch.cat(outputs)

    def finish(self) -> None:
        """After the call: pages and recurrent states of each context are also those of the slots that share it."""
        for span in self.spans:
            if len(span.slots) > 1:
                self.cache.link(span.slots[0], span.slots[1:])
                if self.cache.states.tensors():
                    self.cache.states.copy(span.slots[0], torch.tensor(span.slots[1:], device=self.device))


class PagedDecodePlan:
    """One new token for each of the first rows of the block table.

    Makes no page: :func:`open_cells` must have been called. What it computes depends on tensors alone, so a captured graph
    may be replayed with other positions in the same tensor.

    Args:
        cache: holds their past.
        positions: position of the new token of each row [rows]; -1 for padding, which writes where nobody reads.
        columns: tokens to look at; beyond every position.
        live: rows that are no padding, where ``positions`` does not say so; None: it does.
    """

    def __init__(self, cache: PagedCache, positions: Tensor, columns: int, live: int | None = None) -> None:
        row = torch.arange(len(positions), device=positions.device)
        self.cache, self.columns = cache, columns
        self._positions = positions if live is None else torch.where(row < live, positions, -1)
        self.position_ids = self._positions.clamp(min=0)
        self._cells = cache.cells(row, self._positions)
        self._table = cache.table[: len(positions)]
        self._state_rows = torch.where(self._positions >= 0, row, cache.slots + row % SCRATCH)

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [rows, heads, size] to the pages and attend over them."""
        self.cache.write(layer.layer, self._cells, k, v)
        keys, values = self.cache.pool(layer.layer)
        return paged_attention(layer, q, keys, values, self._table, self._positions, self.columns)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """All rows in one step of the recurrence."""
        return forward(hidden[:, None], cache_params=self.cache.states.at(module, self._state_rows))[:, 0]


def open_cells(cache: PagedCache, positions: Seq[int]) -> None:
    """Give the first rows a cell of their own for the token at each of ``positions``; -1 leaves a row alone."""
    for row, position in enumerate(positions):
        if position >= 0:
            cache.extend(row, position, position + 1)
    cache.publish()
