"""The attention plan of training and prefill, for packed sequences of different lengths.

Sequences are concatenated into one row of T tokens and do not attend to each other. For attention, sequences of similar length
form a group, and the sequences of a group are padded to the length of the group's longest sequence. A group has at most one
padding token per five other tokens, so a long sequence does not make short sequences expensive. Variable-length kernels on GPUs
need no padding.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.device import upload
from areno.engine.model.attention import Forward, LayerAttention, scaled_dot_product, window_mask
from areno.engine.model.routing import Routing
from areno.engine.model.varlen import find_kernel

MAX_PADDED_SHARE = 1.2


class _Scatter(torch.autograd.Function):
    """Copy row i of x to row ``index[i]`` of a tensor of zeros. The indices are distinct, so the backward pass is a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, cells: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(cells, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


class _Gather(torch.autograd.Function):
    """Gather rows of x at unique indices ``index``. The backward pass writes each row once, without accumulation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of similar length, which are padded to one batch [B, L].

    ``rows`` holds the positions of the sequences' tokens in the packed row. ``cells`` holds the positions of these tokens in
    the flattened batch [B * L].
    """

    size: int
    length: int
    rows: Tensor
    cells: Tensor
    prefix: Tensor | None  # packed positions of the common prefix of S tokens, or None

    def pad(self, x: Tensor) -> Tensor:
        """Convert packed values [T, ...] to a batch [B, L, ...], with zeros after the end of each sequence."""
        rows = x if len(self.rows) == len(x) else _Gather.apply(x, self.rows)
        return _Scatter.apply(rows, self.cells, self.size * self.length).view(self.size, self.length, *x.shape[1:])

    def contexts(self, x: Tensor) -> Tensor:
        """Convert packed values [T, ...] to a batch [B, S + L, ...].

        Each row starts with the common prefix of the group (S tokens), followed by one sequence, padded to L tokens. Without a
        prefix, S is 0.
        """
        if self.prefix is None:
            return self.pad(x)
        prefix = _Gather.apply(x, self.prefix)
        return torch.cat([prefix.expand(self.size, *prefix.shape), self.pad(x)], 1)

    def unpad(self, x: Tensor) -> Tensor:
        """Remove the padding from a batch [B, L, ...] of B sequences. Return a tensor with one row per token."""
        return _Gather.apply(x.reshape(self.size * self.length, *x.shape[2:]), self.cells)


class PackedPlan:
    """An :class:`~areno.engine.model.attention.AttentionPlan` for concatenated sequences.

    ``routing`` records or replays expert choices.

    Args:
        lengths: number of tokens of each sequence, in packed order.
        device: device of the plan's tensors.
        prefixes: for each sequence, the packed positions of its prefix. The sequence also attends to these positions. None: no
            sequence has a prefix.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.routing: Routing | None = None
        self.lengths = list(lengths)
        self.starts = [0, *accumulate(self.lengths)]
        self.device = torch.device(device)
        self._prefixes = prefixes or [()] * len(self.lengths)
        befores = [len(prefix) for prefix in self._prefixes]
        positions = [torch.arange(first, first + n) for first, n in zip(befores, self.lengths, strict=True)]
        self.position_ids = upload(torch.cat(positions), self.device)
        siblings: dict[int, list[int]] = {}  # sequences that continue the same prefix
        for index, prefix in enumerate(self._prefixes):
            siblings.setdefault(prefix[-1] if prefix else -1, []).append(index)
        self.groups = [
            self._group([same[i] for i in group])
            for same in siblings.values()
            for group in _group_by_length([self.lengths[i] for i in same])
        ]
        self._inverse = self._inverse_order() if len(self.groups) > 1 else None
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}

    @property
    def tokens(self) -> int:
        """Number of packed tokens."""
        return self.starts[-1]

    @functools.cached_property
    def boundaries(self) -> Tensor:
        """Packed position of each sequence's first token, followed by the total number of tokens: int32 [N + 1]."""
        return upload(torch.tensor(self.starts, dtype=torch.int32), self.device)

    def _group(self, members: list[int]) -> _Group:
        longest = max(self.lengths[i] for i in members)
        rows = torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for i in members])
        cells = torch.cat([torch.arange(self.lengths[i]) + row * longest for row, i in enumerate(members)])
        before = self._prefixes[members[0]]
        prefix = upload(torch.tensor(before), self.device) if before else None
        return _Group(len(members), longest, upload(rows, self.device), upload(cells, self.device), prefix)

    @functools.cached_property
    def _contexts(self) -> tuple[Tensor, Tensor, int]:
        """The concatenated contexts of all N sequences: packed positions of their tokens, boundaries, and maximum length.

        The context of a sequence is its prefix (see the class), followed by the sequence itself. The boundaries
        (int32 [N + 1]) are the start of each context in the concatenation, followed by the total length.
        """
        seen = [[*prefix, *range(*own)] for prefix, own in zip(self._prefixes, pairwise(self.starts), strict=True)]
        starts = torch.tensor([0, *accumulate(map(len, seen))], dtype=torch.int32)
        places = torch.tensor(list(chain.from_iterable(seen)))
        return upload(places, self.device), upload(starts, self.device), max(map(len, seen))

    def _inverse_order(self) -> Tensor:
        order = torch.cat([group.rows for group in self.groups])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return inverse

    def _mask(self, group: _Group, window: int | None, like: Tensor) -> Tensor | None:
        """Return the attention mask for a group of sequences; None if a plain causal mask suffices."""
        before = 0 if group.prefix is None else len(group.prefix)
        if not before and (window is None or group.length <= window):
            return None
        return self._causal_mask(before, group.length, window, like)

    def _causal_mask(self, before: int, length: int, window: int | None, like: Tensor) -> Tensor:
        """Return an additive causal mask [length, before + length]. ``before`` is the number of tokens before the queries."""
        key = (before, length, window, like.dtype)
        if key not in self._masks:
            self._masks[key] = window_mask(before + length, window, like, before)
        return self._masks[key]

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention within each sequence; see :class:`~areno.engine.model.attention.AttentionPlan`."""
        kernel = find_kernel(layer, q, v)
        if kernel is not None:
            starts, longest = self.boundaries, max(self.lengths)
            if any(self._prefixes):
                places, starts, longest = self._contexts
                k, v = k[places], v[places]
            return kernel.attend(q, k, v, (self.boundaries, starts), (max(self.lengths), longest), layer)
        outputs = []
        for group in self.groups:
            padded = [x.transpose(1, 2) for x in (group.pad(q), group.contexts(k), group.contexts(v))]
            mask = self._mask(group, layer.window, q)
            out = scaled_dot_product(padded[0], padded[1], padded[2], layer, mask, causal=mask is None)
            outputs.append(group.unpad(out.transpose(1, 2)))
        return self.join(outputs)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run a recurrent layer over packed hidden states [T, C], and return its packed outputs.

        ``forward`` computes the layer. This method calls ``forward`` with padded batches [B, L, C] of B sequences.
        """
        return self.join([group.unpad(forward(group.pad(hidden))) for group in self.groups])

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate the outputs of all groups of sequences, and restore the packed order of the tokens."""
        if self._inverse is None:
            return outputs[0]
        return _Gather.apply(torch.cat(outputs), self._inverse)


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Divide sequences into groups of similar length, and return the indices of each group.

    The padded size of a group is at most ``MAX_PADDED_SHARE`` times the number of tokens in the group.
    """
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
