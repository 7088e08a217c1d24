"""Sequences that begin alike, as one tree: tokens that they share are computed once.

A token sees itself and its ancestors, which are exactly the tokens before it in each sequence that it belongs to. Its position
is its depth. So hidden states, and by them log-probs and gradients, are those of the sequences apart.

A sequence brings the nodes that no earlier one had, and these end it. So its attention is that of its last tokens over all
of it, and costs nothing for other sequences.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from areno.engine.device import upload
from areno.engine.model.attention import LayerAttention, scaled_dot_product, window_mask
from areno.engine.model.packing import PaddedGroup, gather, group_by_length, pad_together
from areno.engine.model.varlen import find_kernel
from areno.errors import EngineError


class TokenTree:
    """Token sequences, each beginning stored once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of each node; a parent comes before its children
        self._children: dict[tuple[int, int], int] = {}

    def shared(self, sequence: Sequence[int]) -> int:
        """How many tokens at the beginning of a sequence are in the tree already."""
        node = -1
        for count, token in enumerate(sequence):
            child = self._children.get((node, token))
            if child is None:
                return count
            node = child
        return len(sequence)

    def add(self, sequence: Sequence[int]) -> list[int]:
        """Put a sequence in, and return the node of each of its tokens."""
        path, node = [], -1
        for token in sequence:
            child = self._children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
            path.append(child)
            node = child
        return path


@dataclass(frozen=True, slots=True)
class _Branches:
    """Rows that leave the tree at one node: their own tokens padded together, after the ``prefix`` that they share [S]."""

    own: PaddedGroup
    prefix: Tensor

    def keys(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, S + L, ...]: the shared tokens before each row's own."""
        own = self.own.pad(x)
        if not len(self.prefix):
            return own
        return torch.cat([gather(x, self.prefix)[None].expand(len(own), *[-1] * x.ndim), own], 1)


class TreePlan:
    """Attention plan of a tree.

    Args:
        paths: nodes of each row as :meth:`TokenTree.add` has returned them, all rows in that order.
        device: where the tokens are.
    """

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        own: list[int] = []  # of each row that brings nodes, how many: the last ones of its path
        branches: dict[int, list[int]] = {}  # of each node at which rows leave, those rows; -1 for whole rows
        kept: list[Sequence[int]] = []
        known = 0
        for path in paths:
            new = len(path) - bisect_left(path, known)
            known += new
            if new:
                branches.setdefault(path[-new - 1] if new < len(path) else -1, []).append(len(kept))
                kept.append(path)
                own.append(new)
        self._own, self._lengths = own, [len(path) for path in kept]
        starts = [0, *accumulate(own)]
        self.position_ids = upload(
            torch.cat([torch.arange(len(path) - n, len(path)) for path, n in zip(kept, own, strict=True)]), self.device
        )
        self._branches = [
            _Branches(
                pad_together([own[i] for i in group], [starts[i] for i in group], self.device),
                upload(torch.tensor(kept[group[0]][: -own[group[0]]], dtype=torch.int64), self.device),
            )
            for rows in branches.values()
            for group in ([rows[i] for i in part] for part in group_by_length([own[i] for i in rows]))
        ]
        self._inverse = upload(torch.cat([branch.own.rows for branch in self._branches]).cpu().argsort(), self.device)
        self._paths = [torch.tensor(path) for path in kept]
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}

    @functools.cached_property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """For a variable-length kernel: all paths end to end, and the first query and key of each row (int32 [N + 1])."""
        bounds = [torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (self._own, self._lengths)]
        return (
            upload(torch.cat(self._paths), self.device),
            upload(bounds[0], self.device),
            upload(bounds[1], self.device),
        )

    def _mask(self, queries: int, shared: int, window: int | None, like: Tensor) -> Tensor | None:
        if not shared and (window is None or queries <= window):
            return None
        key = (queries, shared, window, like.dtype)
        if key not in self._masks:
            self._masks[key] = window_mask(shared + queries, window, like, shared)
        return self._masks[key]

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of each token over itself and its ancestors: q [T, H, D] and k, v [T, K, D] to [T, H, Dv]."""
        kernel = find_kernel(layer, q, v)
        if kernel is not None:
            paths, *starts = self._flat
            longest = (max(self._own), max(self._lengths))
            return kernel.attend(q, k[paths], v[paths], (starts[0], starts[1]), longest, layer)
        outputs = []
        for branch in self._branches:
            own = branch.own
            heads = [x.transpose(1, 2) for x in (own.pad(q), branch.keys(k), branch.keys(v))]
            mask = self._mask(own.length, len(branch.prefix), layer.window, q)
            out = scaled_dot_product(heads[0], heads[1], heads[2], layer, mask, causal=mask is None)
            outputs.append(own.unpad(out.transpose(1, 2)))
        return gather(torch.cat(outputs), self._inverse)

    def run_recurrent(self, module: nn.Module, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """Refuse: a state passes from token to token, and a tree has no single next token."""
        raise EngineError(
            "this model has recurrent layers, which cannot follow a tree of sequences; set enable_tree_training=false"
        )
