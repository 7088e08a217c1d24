"""Attention plan for sequences with common prefixes. The tokens form a tree, so shared tokens are computed once.

A token attends to itself and to its ancestors. The ancestors are exactly the tokens that precede the token in its sequence. The
token's position is its depth in the tree. Up to rounding, hidden states, log-probs and gradients therefore equal those of
separate sequences.

If a sequence has a prefix in common with an earlier sequence, the sequence adds nodes only for the tokens after the longest
common prefix. Attention is computed only for these new tokens, which also attend to the prefix.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from areno.engine.model.attention import Forward
from areno.engine.model.packing import PackedPlan
from areno.errors import EngineError


class TokenTree:
    """A prefix tree (trie) of token sequences."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # token of each node; parents come before their children
        self._children: dict[tuple[int, int], int] = {}

    def shared(self, sequence: Sequence[int]) -> int:
        """Return the length of the longest prefix of ``sequence`` that the tree contains."""
        node = -1
        for count, token in enumerate(sequence):
            child = self._children.get((node, token))
            if child is None:
                return count
            node = child
        return len(sequence)

    def add(self, sequence: Sequence[int]) -> list[int]:
        """Insert a sequence, and return the index of each token's node."""
        path, node = [], -1
        for token in sequence:
            child = self._children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
            path.append(child)
            node = child
        return path


class TreePlan(PackedPlan):
    """Attention plan of a tree. ``paths`` are the results of :meth:`TokenTree.add`, in the order of the calls."""

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        lengths, prefixes, nodes = [], [], 0
        for path in paths:
            shared = bisect_left(path, nodes)  # parents come before their children
            if shared < len(path):
                lengths.append(len(path) - shared)
                prefixes.append(path[:shared])
                nodes += len(path) - shared
        super().__init__(lengths, device, prefixes)

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Raise EngineError: a recurrent layer cannot process a tree, where one token can have several successors."""
        raise EngineError(
            "this model has recurrent layers, which cannot process a tree of sequences; set enable_tree_training=false"
        )
