"""KV cache in slots, and the plans that read and write it.

One slot holds one live sequence: ``[slots, heads, columns, size]`` per layer. Slots are compact, so a decode step reads a
view and copies nothing; columns grow while sequences do, so memory follows what is really used and not the worst case.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor, nn

from areno.engine.model.attention import LayerAttention, scaled_dot_product
from areno.engine.model.packing import PackedPlan
from areno.engine.model.recurrent import Forward, SlotStates
from areno.engine.rollout.scheduler import COLUMN_STEP, Move, round_up

# Matrix products round differently at some small row counts; multiples of eight do not depend on the batch around a row.
ROW_STEP = 8


class SlotCache:
    """Keys, values and recurrent states of the live sequences.

    Layers allocate on first use, because only the call knows how many heads of which size they cache.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.slots = 0
        self.columns = 0
        self.states = SlotStates(0)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for ``rows`` sequences of ``columns`` tokens, keeping what is cached."""
        slots = max(self.slots, round_up(rows, ROW_STEP))
        if columns > self.columns:
            # A quarter of headroom keeps the number of copies logarithmic in the length.
            columns = round_up(max(columns, self.columns + self.columns // 4), COLUMN_STEP)
        columns = max(columns, self.columns)
        if (slots, columns) == (self.slots, self.columns):
            return
        for table in (self._keys, self._values):
            for layer, old in table.items():
                new = old.new_zeros(slots, old.shape[1], columns, old.shape[3])
                new[: self.slots, :, : self.columns] = old
                table[layer] = new
        if slots > self.slots:
            self.states.grow(slots)
        self.slots, self.columns = slots, columns

    def release(self) -> None:
        """Give all memory back."""
        self.__init__(self.device)  # type: ignore[misc]

    def nbytes(self) -> int:
        """Bytes held, states included."""
        tensors = [*self._keys.values(), *self._values.values(), *self.states.tensors()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, heads, size] of tokens at ``positions`` [N] of ``slots`` [N]."""
        if layer not in self._keys:
            self._keys[layer] = k.new_zeros(self.slots, k.shape[1], self.columns, k.shape[2])
            self._values[layer] = v.new_zeros(self.slots, v.shape[1], self.columns, v.shape[2])
        self._keys[layer][slots, :, positions] = k
        self._values[layer][slots, :, positions] = v

    def read(self, layer: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Views [rows, heads, columns, size] of the first slots."""
        return self._keys[layer][:rows, :, :columns], self._values[layer][:rows, :, :columns]

    def move(self, moves: Seq[Move]) -> None:
        """Carry out the copies that a compaction asks for."""
        for move in moves:
            for table in (self._keys, self._values):
                for tensor in table.values():
                    tensor[move.target, :, : move.length] = tensor[move.source, :, : move.length]
            self.states.copy(move.source, torch.tensor([move.target], device=self.device))


class PrefillPlan(PackedPlan):
    """Packed contexts without a past, whose keys and values go to all slots that share them.

    Args:
        cache: where they go; it must have room already.
        lengths: tokens of each context.
        slots: slots of each context; each receives a copy.
    """

    def __init__(self, cache: SlotCache, lengths: Seq[int], slots: Seq[Seq[int]]) -> None:
        super().__init__(lengths, cache.device)
        self.cache = cache
        self._slots = [torch.tensor(rows, device=cache.device) for rows in slots]
        token, slot, position = [], [], []
        for start, length, rows in zip(self.starts, self.lengths, slots, strict=False):
            span = torch.arange(length)
            token.append((span + start).repeat(len(rows)))
            position.append(span.repeat(len(rows)))
            slot.append(torch.tensor(rows).repeat_interleave(length))
        self._token, self._slot, self._position = (torch.cat(x).to(cache.device) for x in (token, slot, position))
        cache.states.clear(torch.cat(self._slots))

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write to the cache, then attend inside each context."""
        self.cache.write(layer.layer, self._slot, self._position, k[self._token], v[self._token])
        return super().attend(layer, q, k, v)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """One context at a time: a state that is kept must not see padding."""
        outputs = []
        for start, length, slots in zip(self.starts, self.lengths, self._slots, strict=False):
            states = self.cache.states.at(module, slots[:1])
            outputs.append(forward(hidden[None, start : start + length], cache_params=states)[0])
        return torch.cat(outputs)

    def finish(self) -> None:
        """After the call: hand recurrent states on to the slots that share a context."""
        for slots in self._slots:
            if len(slots) > 1:
                self.cache.states.copy(int(slots[0]), slots[1:])


class DecodePlan:
    """One new token for each of the first ``rows`` slots.

    Args:
        cache: holds their past.
        positions: position of the new token of each row [rows].
        columns: cache columns to look at; beyond every position.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, columns: int) -> None:
        self.cache = cache
        self.position_ids = positions
        self.columns = columns
        self._rows = torch.arange(len(positions), device=positions.device)
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            columns = torch.arange(self.columns, device=self.position_ids.device)[None, :]
            hidden = columns > self.position_ids[:, None]
            if window is not None:
                hidden |= columns <= self.position_ids[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [rows, heads, size] to the cache and attend over it."""
        self.cache.write(layer.layer, self._rows, self.position_ids, k, v)
        keys, values = self.cache.read(layer.layer, len(self._rows), self.columns)
        mask = self._mask(layer.window, q.dtype)
        return scaled_dot_product(q[:, :, None], keys, values, layer, mask)[:, :, 0]

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """All rows in one step of the recurrence."""
        return forward(hidden[:, None], cache_params=self.cache.states.at(module, self._rows))[:, 0]
