"""Sequences that begin alike, as one tree: tokens that they share are computed once.

A token sees itself and its ancestors, which are exactly the tokens before it in each sequence that it belongs to. Its position
is its depth. So hidden states, and by them log-probs and gradients, are those of the sequences apart.

A sequence brings the nodes that no earlier one had, and these end it. So its attention is that of its last tokens over all
of it, and costs nothing for other sequences.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from areno.engine.model.packing import PackedPlan
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


class TreePlan(PackedPlan):
    """Attention plan of a tree. ``paths``: nodes of each row as :meth:`TokenTree.add` has returned them, in that order."""

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        lengths, prefixes, known = [], [], 0
        for path in paths:
            shared = bisect_left(path, known)  # a parent comes before its children
            if shared < len(path):
                lengths.append(len(path) - shared)
                prefixes.append(path[:shared])
                known += len(path) - shared
        super().__init__(lengths, device, prefixes)

    def run_recurrent(self, module: nn.Module, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """Refuse: a state passes from token to token, and a tree has no single next token."""
        raise EngineError(
            "this model has recurrent layers, which cannot follow a tree of sequences; set enable_tree_training=false"
        )
