"""Sequences that begin alike, as one tree: tokens that they share are computed once.

A token sees itself and its ancestors, which are exactly the tokens before it in each sequence that it belongs to. Its position
is its depth. So hidden states, and by them log-probs and gradients, are those of the sequences apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from areno.engine.model.attention import LayerAttention, scaled_dot_product
from areno.errors import EngineError


class TokenTree:
    """Token sequences, each beginning stored once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of each node; a parent comes before its children
        self.parents: list[int] = []  # of each node, -1 for a first token
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
                self.parents.append(node)
            path.append(child)
            node = child
        return path


class TreePlan:
    """Attention plan of a tree: ``parents`` of each of T tokens, -1 for a first one, come before their children."""

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu") -> None:
        depths: list[int] = []
        visible = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if parent >= 0:
                visible[node] |= visible[parent]
        self.position_ids = torch.tensor(depths).to(device)
        self._visible = visible.to(device)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """Additive mask [T, T], 0 or -inf."""
        key = (window, like.dtype)
        if key not in self._masks:
            visible = self._visible
            if window is not None:
                visible = visible & (self.position_ids[:, None] - self.position_ids[None, :] < window)
            zeros = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            self._masks[key] = zeros.masked_fill_(~visible, float("-inf"))
        return self._masks[key]

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of each token over itself and its ancestors: q [T, H, D] and k, v [T, K, D] to [T, H, Dv]."""
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return scaled_dot_product(heads[0], heads[1], heads[2], layer, self._mask(layer.window, q))[0].transpose(0, 1)

    def run_recurrent(self, module: nn.Module, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """Refuse: a state passes from token to token, and a tree has no single next token."""
        raise EngineError(
            "this model has recurrent layers, which cannot follow a tree of sequences; set enable_tree_training=false"
        )
