"""Divide rows into microbatches, also called bins, within a token budget.

There are two algorithms. ``ffd`` (first fit decreasing) assigns rows in the order of decreasing length. With a token
budget, each row goes to the first bin that has enough room. Without a budget, each row goes to the bin that has the
fewest tokens so far. If the setting ``tree`` of :class:`MicroBatching` is true, ``ffd`` does not use these rules, but
groups rows that share prefixes. ``kk`` (the differencing method of Karmarkar and Karp) makes bins with nearly equal
numbers of tokens, so that all forward passes take about the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areno.engine.model.tree import TokenTree
from areno.engine.parallel.balance import shares

Weights = Sequence[int]


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Settings that determine how the rows of an optimizer step are divided into microbatches.

    The division affects time and memory. Results with different divisions differ only by rounding.

    Raises:
        ValueError: a number is below 1, the algorithm is unknown, or ``tree`` is combined with the algorithm ``kk``.
    """

    n_mbs: int | None = 1  # minimum number of microbatches, if there are enough blocks of rows
    granularity: int = 1  # number of adjacent rows that stay together as a block; the last block may be smaller
    max_tokens_per_mb: int | None = None  # maximum tokens of a microbatch, unless a single block is longer
    n_mbs_divisor: int = 1  # the number of microbatches is a multiple of this, unless each block is a microbatch
    packing_algorithm: Literal["ffd", "kk"] = "ffd"
    tree: bool = False  # common prefixes are computed once, and count once in ``max_tokens_per_mb``

    def __post_init__(self) -> None:
        for name in ("n_mbs", "granularity", "max_tokens_per_mb", "n_mbs_divisor"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"mb_spec.{name} must be at least 1, got {value}")
        if self.packing_algorithm not in ("ffd", "kk"):
            raise ValueError(f"mb_spec.packing_algorithm must be ffd or kk, got {self.packing_algorithm!r}")
        if self.tree and self.packing_algorithm == "kk":
            raise ValueError(
                "mb_spec.packing_algorithm=kk does not support tree training; set mb_spec.packing_algorithm=ffd"
            )

    def bins(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Divide rows of token ids into microbatches (lists of ascending row indices). Sort the lists by their first index."""
        indices = range(len(rows))
        blocks = [indices[start : start + self.granularity] for start in indices[:: self.granularity]]
        weights = [sum(len(rows[row]) for row in block) for block in blocks]
        if self.packing_algorithm == "kk":
            bins = self._balanced(weights)
        elif self.max_tokens_per_mb is None and not self.tree:
            bins = _lightest_first(weights, min(self._wanted(1), len(weights)))
        else:
            bins = self._most_shared(rows, blocks, weights) if self.tree else self._first_fit(weights)
            bins = _split_to(bins, weights, min(self._wanted(len(bins)), len(weights)))
        return sorted([row for block in sorted(bin_) for row in blocks[block]] for bin_ in bins if bin_)

    def _most_shared(
        self, rows: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]], weights: Weights
    ) -> list[list[int]]:
        """Divide blocks of rows into bins (microbatches). If possible, rows with a common prefix are in the same bin.

        Return the indices of the blocks in each bin. Blocks are sorted by the token ids of their first rows, in lexicographic
        order. Prefixes that a bin already contains need no room in this bin. Among the bins with enough room, each block goes
        to the bin where the block needs the least room. If no bin has enough room, the block starts a new bin.
        """
        most = self.max_tokens_per_mb or sum(weights)
        bins: list[list[int]] = []
        trees: list[TokenTree] = []
        for item in sorted(range(len(blocks)), key=lambda i: list(rows[blocks[i][0]])):
            added = [weights[item] - sum(tree.shared(rows[row]) for row in blocks[item]) for tree in trees]
            fitting = [b for b, tree in enumerate(trees) if len(tree.tokens) + added[b] <= most]
            place = min(fitting, key=lambda b: added[b], default=len(bins))
            if place == len(bins):
                bins.append([])
                trees.append(TokenTree())
            bins[place].append(item)
            for row in blocks[item]:
                trees[place].add(rows[row])
        return bins

    def _wanted(self, bins: int) -> int:
        return -(-max(bins, self.n_mbs or 1) // self.n_mbs_divisor) * self.n_mbs_divisor

    def _first_fit(self, weights: Weights) -> list[list[int]]:
        assert self.max_tokens_per_mb is not None
        bins: list[list[int]] = []
        room: list[int] = []
        for item in _heaviest_first(weights):
            place = next((b for b, free in enumerate(room) if weights[item] <= free), len(bins))
            if place == len(bins):
                bins.append([])
                room.append(self.max_tokens_per_mb)
            bins[place].append(item)
            room[place] -= weights[item]
        return bins

    def _balanced(self, weights: Weights) -> list[list[int]]:
        if not weights:
            return []
        most = self.max_tokens_per_mb or sum(weights)
        count = self._wanted(-(-sum(weights) // max(most, 1)))
        while count < len(weights):
            bins = shares(weights, count)
            if all(len(bin_) <= 1 or sum(weights[i] for i in bin_) <= most for bin_ in bins):
                return bins
            count += self.n_mbs_divisor
        return [[i] for i in range(len(weights))]


def _heaviest_first(weights: Weights) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: -weights[i])


def _lightest_first(weights: Weights, count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for item in _heaviest_first(weights):
        place = sums.index(min(sums))
        bins[place].append(item)
        sums[place] += weights[item]
    return bins


def _split_to(bins: list[list[int]], weights: Weights, count: int) -> list[list[int]]:
    while len(bins) < count:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(weights[i] for i in b))
        halves = shares([weights[i] for i in heaviest], 2)
        bins = [b for b in bins if b is not heaviest] + [[heaviest[i] for i in half] for half in halves]
    return bins
