"""KV cache with one slot per sequence, and the attention plans that read and write this cache.

This cache is used on CPUs, and on GPUs with tensor parallelism. Without tensor parallelism, GPUs use the cache in ``paged/``.

The keys and the values of a layer have the shape ``[slots, heads, columns, size]``. There are no gaps between the slots in use,
so a decode step reads a view without copying. Columns are added as sequences grow, and not reserved for the maximum length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from areno.engine.model.attention import Forward, LayerAttention, scaled_dot_product
from areno.engine.model.packing import PackedPlan
from areno.engine.model.recurrent import SlotStates
from areno.engine.model.routing import Recording, Routers, Routing
from areno.engine.rollout.scheduler import COLUMN_STEP, Move, round_up

Snapshot = dict[int, tuple[Tensor, Tensor]]

# Matrix products round differently at some small row counts; with multiples of 8, a row's result does not depend on the count.
ROW_STEP = 8
# Attention reads a multiple of this number of columns. Smaller steps waste less; steps of at least 8 give equal results.
READ_STEP = 16


def _routing_layer(mixture: int) -> int:
    """Return the index of the cache layer with an MoE layer's expert choices: -1, -2, ... Other layers have indices from 0."""
    return -1 - mixture


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The cache layout of a layer. Per token, the layer has keys [heads, key_size] and values [heads, value_size]."""

    layer: int
    heads: int
    key_size: int
    value_size: int


class KVCache(ABC):
    """Holds the keys, values and recurrent states of the live sequences, in slots or in pages.

    The memory of a layer is allocated when the layer first writes to the cache.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.slots = 0
        self.columns = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states = SlotStates(0)
        self.records: Routers | None = None  # routers whose choices are cached as additional layers

    def recording(self, write: Callable[[int, Tensor, Tensor], None]) -> Routing | None:
        """Return a :class:`Routing` that records expert choices in the cache; None if no choices are recorded.

        For each MoE layer, the cache has an additional layer, whose keys are the expert choices and whose values have size 0.
        ``write(layer, keys, values)`` writes the keys and values of a layer to the cache.
        """
        if self.records is None:
            return None
        kind = self.records.kind

        def record(mixture: int, chosen: Tensor) -> None:
            choices = chosen.to(kind)[:, None]
            write(_routing_layer(mixture), choices, choices[..., :0])

        return Recording(record)

    def routed(self, slot: int, length: int) -> Tensor:
        """Return the recorded expert choices [length, MoE layers, K] of a slot's first ``length`` tokens."""
        assert self.records is not None
        layers = map(_routing_layer, range(self.records.mixtures))
        return torch.stack([self._keys_of(layer, slot, length) for layer in layers], 1)

    @abstractmethod
    def _keys_of(self, layer: int, slot: int, length: int) -> Tensor:
        """Return the keys [length, size] of a slot's first ``length`` tokens in a layer. The layer must have only one head."""

    def tensors(self) -> list[Tensor]:
        """Return all allocated tensors."""
        return [*self.keys.values(), *self.values.values(), *self.states.tensors()]

    def make_finite(self) -> None:
        """Set values that are not finite to 0, because a masked NaN would still make the attention output NaN."""
        for tensor in self.tensors():
            tensor.nan_to_num_(0.0, 0.0, 0.0)

    def nbytes(self) -> int:
        """Return the size of the cache in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


class SlotCache(KVCache):
    """Holds keys and values [slots, heads, columns, size] for each layer. A slot holds one sequence, one token per column."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self._leading: tuple[int, list[Tensor], list[Tensor]] | None = None

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the cache to hold ``rows`` sequences of ``columns`` tokens. The first ``rows`` slots keep their contents."""
        slots = max(self.slots, round_up(rows, ROW_STEP))
        if columns >= self.columns:
            # Drop unused slots first: they would grow as well, and exceed the budget.
            slots = round_up(rows, ROW_STEP)
            # Growing by a quarter keeps the number of copies logarithmic in the length. Padding rows of a decode step write to
            # the last column, which is otherwise unused.
            columns = round_up(max(columns, self.columns + self.columns // 4), COLUMN_STEP) + 1
        elif slots > self.slots:  # more slots with the columns of an earlier, longer sequence would exceed the budget
            columns = round_up(columns, COLUMN_STEP) + 1
        else:
            columns = self.columns
        if (slots, columns) == (self.slots, self.columns):
            return
        kept = min(columns, self.columns)
        self._leading = None  # its views would keep the old memory of all layers alive
        for table in (self.keys, self.values):
            for layer, old in table.items():
                new = old.new_zeros(slots, old.shape[1], columns, old.shape[3])
                common = min(self.slots, slots)
                new[:common, :, :kept] = old[:common, :, :kept]
                table[layer] = new
        if slots > self.states.slots:
            self.states.grow(slots)
        self.slots, self.columns = slots, columns

    def leading(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the first ``rows`` slots: the keys of all layers and the values of all layers, in layer order."""
        if self._leading is None or self._leading[0] != rows:
            layers = sorted(self.keys)
            views = [self.keys[layer][:rows] for layer in layers], [self.values[layer][:rows] for layer in layers]
            self._leading = (rows, *views)
        return self._leading[1:]

    def release(self) -> None:
        """Free all memory of the cache."""
        records = self.records
        self.__init__(self.device)  # type: ignore[misc]
        self.records = records

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys ``k`` and values ``v`` [N, heads, size] of N tokens.

        Token i is stored in slot ``slots[i]``, in column ``positions[i]``.
        """
        if layer not in self.keys:
            self.keys[layer] = k.new_zeros(self.slots, k.shape[1], self.columns, k.shape[2])
            self.values[layer] = v.new_zeros(self.slots, v.shape[1], self.columns, v.shape[2])
            self._leading = None
        self.keys[layer][slots, :, positions] = k
        self.values[layer][slots, :, positions] = v

    def _keys_of(self, layer: int, slot: int, length: int) -> Tensor:
        return self.keys[layer][slot, 0, :length]

    def read(self, layer: int, rows: int, columns: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return views [rows, heads, columns, size] of a layer's keys and values, starting at slot ``first``."""
        chosen = slice(first, first + rows)
        return self.keys[layer][chosen, :, :columns], self.values[layer][chosen, :, :columns]

    def snapshot(self, slot: int, length: int) -> Snapshot:
        """Return a copy of the keys and values [heads, length, size] of each layer for a slot's first ``length`` tokens."""
        return {
            layer: (self.keys[layer][slot, :, :length].clone(), self.values[layer][slot, :, :length].clone())
            for layer in self.keys
        }

    def restore(self, snapshot: Snapshot, slots: Seq[int], length: int) -> None:
        """Copy the keys and values of a snapshot's first ``length`` tokens to each of ``slots``."""
        rows = torch.tensor(slots, device=self.device)
        for layer, (keys, values) in snapshot.items():
            self.keys[layer][rows, :, :length] = keys[:, :length]
            self.values[layer][rows, :, :length] = values[:, :length]

    def move(self, moves: Seq[Move]) -> None:
        """Copy sequences to other slots."""
        for move in moves:
            for table in (self.keys, self.values):
                for tensor in table.values():
                    tensor[move.target, :, : move.length] = tensor[move.source, :, : move.length]
            self.states.copy(move.source, torch.tensor([move.target], device=self.device))


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens to prefill: ``length`` tokens of a context (a prompt and its output so far), after ``offset`` cached tokens.

    Several samples may share one context. ``slots`` are the slots of these samples.
    """

    slots: Seq[int]
    length: int
    offset: int = 0


class PrefillPlan(PackedPlan):
    """Attention plan of a prefill. The input is a concatenation of spans (:class:`PrefillSpan`).

    The keys and values of a span are written to the slots of all samples that share the span's context.

    Args:
        cache: KV cache with enough slots and columns, which already contains the tokens before each span.
        spans: spans to prefill, in packed order.
    """

    def __init__(self, cache: SlotCache, spans: Seq[PrefillSpan]) -> None:
        super().__init__([span.length for span in spans], cache.device)
        self.cache, self.spans = cache, spans
        self._continued = any(span.offset for span in spans)
        if self._continued:
            self.position_ids = self.position_ids + self._per_token([span.offset for span in spans])
        self._place()
        self.routing = cache.recording(self._write)
        fresh = [slot for span in spans if not span.offset for slot in span.slots]
        if fresh and cache.states.tensors():
            cache.states.clear(torch.tensor(fresh, device=self.device))

    def _per_token(self, values: list[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(torch.tensor(self.lengths)).to(self.device)

    def _place(self) -> None:
        token, slot, position = [], [], []
        for start, span in zip(self.starts, self.spans, strict=False):
            index = torch.arange(span.length)
            token.append((index + start).repeat(len(span.slots)))
            position.append((index + span.offset).repeat(len(span.slots)))
            slot.append(torch.tensor(span.slots).repeat_interleave(span.length))
        self._token, self._slot, self._position = (torch.cat(x).to(self.device) for x in (token, slot, position))

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.cache.write(layer, self._slot, self._position, k[self._token], v[self._token])

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write keys ``k`` and values ``v`` to the cache, then compute attention within each context."""
        self._write(layer.layer, k, v)
        return self._attend_cached(layer, q) if self._continued else super().attend(layer, q, k, v)

    def _attend_cached(self, layer: LayerAttention, q: Tensor) -> Tensor:
        spans = self.spans
        contexts = [self.cache.read(layer.layer, 1, s.offset + s.length, first=s.slots[0]) for s in spans]
        return self._attend_pieces(layer, q, contexts)

    def _attend_pieces(self, layer: LayerAttention, q: Tensor, contexts: Seq[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the attention of each :class:`PrefillSpan` separately.

        ``contexts`` has, for each span, the keys and values [1, heads, tokens, size] of all tokens up to the span's end.
        """
        outputs = []
        for span, queries, (keys, values) in zip(self.spans, q.split(self.lengths), contexts, strict=True):
            mask = self._causal_mask(span.offset, span.length, layer.window, q)
            out = scaled_dot_product(queries.transpose(0, 1)[None], keys, values, layer, mask)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run a recurrent layer on one :class:`PrefillSpan` at a time, because padding would change the cached states."""
        outputs = []
        for span, piece in zip(self.spans, hidden.split(self.lengths), strict=True):
            states = self.cache.states.at(module, torch.tensor(span.slots[:1], device=self.device))
            outputs.append(forward(piece[None], cache_params=states)[0])
        return torch.cat(outputs)

    def finish(self) -> None:
        """After the forward pass, copy the recurrent states of each context to the slots of all samples that share the context.

        The forward pass has stored the states only in the first of these slots.
        """
        for span in self.spans:
            if len(span.slots) > 1 and self.cache.states.tensors():
                self.cache.states.copy(span.slots[0], torch.tensor(span.slots[1:], device=self.device))


def decode_mask(positions: Tensor, columns: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive attention mask [N, columns] of tokens at ``positions`` [N].

    A token cannot attend to columns after its position.
    """
    at = positions[:, None]
    hidden = columns[None, :] > at
    if window is not None:
        hidden |= columns[None, :] <= at - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class DecodePlan:
    """A decode step with one new token per row. Row i writes to slot i of the cache. The last rows may be padding.

    Args:
        cache: the KV cache.
        positions: position of each row's new token [rows]. Padding rows may have any position.
        write_at: cache column of each row's new token [rows]: the token's position, or the unused last column for padding rows.
        columns: indices 0, 1, ... of the cache columns to attend to [columns]. They include the position of each new token.
        state_rows: indices of the recurrent states [rows]; None if no layer is recurrent.
    """

    def __init__(
        self,
        cache: SlotCache,
        positions: Tensor,
        write_at: Tensor,
        columns: Tensor,
        state_rows: Tensor | None = None,
    ) -> None:
        self.cache, self.position_ids, self._state_rows = cache, positions, state_rows
        self._write_at, self._columns = write_at, columns
        self._rows = torch.arange(positions.shape[0], device=positions.device)
        self._masks: dict[int | None, Tensor] = {}
        self.routing = cache.recording(self._write)

    @classmethod
    def of(cls, cache: SlotCache, positions: Seq[int], columns: int) -> DecodePlan:
        """Plan a step with a new token at ``positions[i]`` in slot i, for each i.

        Padding rows make the number of rows a multiple of :data:`ROW_STEP`. Padding row j writes to slot j, in which another
        sequence may be in the middle of its prefill. Padding rows therefore write only to the last column, which no sequence
        uses.
        """
        live = len(positions)
        at = torch.tensor([*positions, *[0] * (-live % ROW_STEP)], device=cache.device)
        rows = torch.arange(len(at), device=cache.device)
        write_at = torch.where(rows < live, at, cache.columns - 1)
        state_rows = torch.where(rows < live, rows, cache.slots + rows - live)
        return cls(cache, at, write_at, torch.arange(columns, device=cache.device), state_rows)

    def _mask(self, layer: LayerAttention, q: Tensor) -> Tensor:
        if layer.window not in self._masks:
            self._masks[layer.window] = decode_mask(self.position_ids, self._columns, layer.window, q.dtype)
        return self._masks[layer.window]

    def write(self, layer: LayerAttention, k: Tensor, v: Tensor) -> None:
        """Append keys ``k`` and values ``v`` [rows, heads, size] to the cache."""
        self._write(layer.layer, k, v)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.cache.write(layer, self._rows, self._write_at, k, v)

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys ``k`` and values ``v`` [rows, heads, size] to the cache, and attend over the cache."""
        self.write(layer, k, v)
        # shape[] instead of len(), which would become a constant in a traced step.
        keys, values = self.cache.read(layer.layer, self._rows.shape[0], self._columns.shape[0])
        return scaled_dot_product(q[:, :, None], keys, values, layer, self._mask(layer, q)[:, None, None])[:, :, 0]

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run one step of a recurrent layer for all rows."""
        assert self._state_rows is not None
        return forward(hidden[:, None], cache_params=self.cache.states.at(module, self._state_rows))[:, 0]
