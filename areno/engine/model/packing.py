"""Packed variable-length sequences: the plan for training and for prefill.

Sequences lie end to end in one row of T tokens, and none sees another. Inside attention they are padded, but only with
sequences of similar length: a group is widened while at most a fifth of its cells are padding. One long sequence among
short ones therefore costs its own square and nobody else's. On a GPU with a variable-length kernel nothing is padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.device import upload
from areno.engine.model.attention import LayerAttention, scaled_dot_product, window_mask
from areno.engine.model.varlen import find_kernel

MAX_PADDED_SHARE = 1.2


class _Scatter(torch.autograd.Function):
    """Rows of x [N, ...] into a zero tensor [cells, ...] at unique ``index``; the adjoint is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, cells: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(cells, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


class _Gather(torch.autograd.Function):
    """Rows of x at unique ``index``; the adjoint writes each row once instead of accumulating."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x at ``index``, none of them twice."""
    rows: Tensor = _Gather.apply(x, index)
    return rows


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Sequences that are padded together: ``rows`` are their packed positions, ``cells`` where those lie in [B * L]."""

    size: int
    length: int
    rows: Tensor
    cells: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...] with zeros after each sequence's end."""
        rows = x if len(self.rows) == len(x) else _Gather.apply(x, self.rows)
        return _Scatter.apply(rows, self.cells, self.size * self.length).view(self.size, self.length, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> this group's tokens, in packed order."""
        return _Gather.apply(x.reshape(self.size * self.length, *x.shape[2:]), self.cells)


def pad_together(lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> PaddedGroup:
    """Sequences of ``lengths`` tokens that begin at the packed positions ``starts``."""
    longest = max(lengths)
    rows = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    cells = torch.cat([torch.arange(n) + row * longest for row, n in enumerate(lengths)])
    return PaddedGroup(len(lengths), longest, upload(rows, device), upload(cells, device))


class PackedPlan:
    """Attention plan of sequences packed end to end. ``lengths``: tokens of each sequence, in packed order."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        self.starts = [0, *accumulate(self.lengths)]
        self.device = torch.device(device)
        self.position_ids = upload(torch.cat([torch.arange(n) for n in self.lengths]), self.device)
        self.groups = [
            pad_together([self.lengths[i] for i in group], [self.starts[i] for i in group], self.device)
            for group in group_by_length(self.lengths)
        ]
        self._inverse = self._inverse_order() if len(self.groups) > 1 else None
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @property
    def tokens(self) -> int:
        """Number of packed tokens."""
        return self.starts[-1]

    @functools.cached_property
    def boundaries(self) -> Tensor:
        """First token of each sequence, and the number of all tokens: int32 [N + 1]."""
        return upload(torch.tensor(self.starts, dtype=torch.int32), self.device)

    def _inverse_order(self) -> Tensor:
        order = torch.cat([group.rows for group in self.groups])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return inverse

    def _mask(self, length: int, window: int | None, like: Tensor) -> Tensor | None:
        if window is None or length <= window:
            return None
        key = (length, window, like.dtype)
        if key not in self._masks:
            self._masks[key] = window_mask(length, window, like)
        return self._masks[key]

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention inside each sequence; see :class:`~areno.engine.model.attention.AttentionPlan`."""
        kernel = find_kernel(layer, q, v)
        if kernel is not None:
            longest = max(self.lengths)
            return kernel.attend(q, k, v, (self.boundaries, self.boundaries), (longest, longest), layer)
        outputs = []
        for group in self.groups:
            padded = [group.pad(x).transpose(1, 2) for x in (q, k, v)]
            mask = self._mask(group.length, layer.window, q)
            out = scaled_dot_product(padded[0], padded[1], padded[2], layer, mask, causal=mask is None)
            outputs.append(group.unpad(out.transpose(1, 2)))
        return self.join(outputs)

    def run_recurrent(self, module: nn.Module, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """Run a stateful layer over hidden [T, C] with one padded row per sequence."""
        return self.join([group.unpad(forward(group.pad(hidden))) for group in self.groups])

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Tokens of all groups, concatenated group by group, back into packed order."""
        if self._inverse is None:
            return outputs[0]
        return gather(torch.cat(outputs), self._inverse)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Split sequence indices into groups whose padded size is at most ``MAX_PADDED_SHARE`` of their tokens."""
    if max(lengths) * len(lengths) <= MAX_PADDED_SHARE * sum(lengths):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            longest = lengths[groups[-1][0]]
            if longest * (len(groups[-1]) + 1) <= MAX_PADDED_SHARE * (tokens + lengths[index]):
                groups[-1].append(index)
                tokens += lengths[index]
                continue
        groups.append([index])
        tokens = lengths[index]
    return [sorted(group) for group in groups]
