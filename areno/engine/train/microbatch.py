"""Which rows share a forward pass: bins of rows within a budget of tokens.

Two ways to fill them. ``ffd``, first fit decreasing, takes rows from long to short and puts each into the first bin with room:
few bins. ``kk``, Karmarkar and Karp's differencing, makes bins of nearly equal weight: equal work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areno.engine.model.tree import TokenTree
from areno.engine.parallel.balance import shares

Weights = Sequence[int]


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How the rows of an optimizer step are cut into microbatches; it changes time and memory, never the result.

    Raises:
        ValueError: a number is below 1, the algorithm is unknown, or trees are to be packed by ``kk``.
    """

    n_mbs: int | None = 1  # least number of microbatches, or with no ``max_tokens_per_mb`` the number
    granularity: int = 1  # this many neighbouring rows stay together
    max_tokens_per_mb: int | None = None  # most tokens of one, except of a single longer block of rows
    n_mbs_divisor: int = 1  # the number of microbatches is a multiple of it, unless each block is one
    packing_algorithm: Literal["ffd", "kk"] = "ffd"  # ``ffd`` or ``kk``
    tree: bool = False  # what rows begin with is computed once, and counts once in ``max_tokens_per_mb``

    def __post_init__(self) -> None:
        for name in ("n_mbs", "granularity", "max_tokens_per_mb", "n_mbs_divisor"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"mb_spec.{name} must be at least 1, got {value}")
        if self.packing_algorithm not in ("ffd", "kk"):
            raise ValueError(f"mb_spec.packing_algorithm must be ffd or kk, got {self.packing_algorithm!r}")
        if self.tree and self.packing_algorithm == "kk":
            raise ValueError("tree training packs rows by what they share; set mb_spec.packing_algorithm=ffd")

    def check(self, rows: int) -> None:
        """Refuse a number of rows that would part a block."""
        if rows % self.granularity:
            raise ValueError(
                f"mb_spec.granularity {self.granularity} does not divide {rows} rows, so a block would be cut"
            )

    def bins(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Cut rows of tokens into microbatches; see :meth:`split`."""
        if not self.tree:
            return self.split([len(row) for row in rows])
        self.check(len(rows))
        blocks = [list(range(start, start + self.granularity)) for start in range(0, len(rows), self.granularity)]
        weights = [sum(len(rows[row]) for row in block) for block in blocks]
        bins = self._most_shared(rows, blocks, weights)
        bins = _split_to(bins, weights, min(self._wanted(len(bins)), len(blocks)))
        return sorted([row for block in sorted(bin_) for row in blocks[block]] for bin_ in bins)

    def _most_shared(
        self, rows: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]], weights: Weights
    ) -> list[list[int]]:
        """Blocks in the order of their first rows' tokens, each to the tree with room to which it adds fewest."""
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

    def split(self, lengths: Weights) -> list[list[int]]:
        """Indices of the rows of each microbatch, ascending, none empty; microbatches in the order of their first rows."""
        self.check(len(lengths))
        blocks = range(0, len(lengths), self.granularity)
        weights = [sum(lengths[start : start + self.granularity]) for start in blocks]
        bins = (self._first_fit if self.packing_algorithm == "ffd" else self._balanced)(weights)
        return sorted(
            [blocks[i] + row for i in sorted(bin_) for row in range(self.granularity)] for bin_ in bins if bin_
        )

    def _wanted(self, bins: int) -> int:
        """The number of bins that is asked for where ``bins`` are needed."""
        return -(-max(bins, self.n_mbs or 1) // self.n_mbs_divisor) * self.n_mbs_divisor

    def _first_fit(self, weights: Weights) -> list[list[int]]:
        order = sorted(range(len(weights)), key=lambda i: -weights[i])
        if self.max_tokens_per_mb is None:
            return _lightest_first(weights, order, min(self._wanted(1), len(weights)))
        bins: list[list[int]] = []
        room: list[int] = []
        for item in order:
            place = next((b for b, free in enumerate(room) if weights[item] <= free), len(bins))
            if place == len(bins):
                bins.append([])
                room.append(self.max_tokens_per_mb)
            bins[place].append(item)
            room[place] -= weights[item]
        return _split_to(bins, weights, min(self._wanted(len(bins)), len(weights)))

    def _balanced(self, weights: Weights) -> list[list[int]]:
        """The fewest bins, in steps of the divisor, that differencing keeps within the budget."""
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


def _lightest_first(weights: Weights, order: Sequence[int], count: int) -> list[list[int]]:
    """Each item, from heavy to light, to the bin that is lightest so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for item in order:
        place = sums.index(min(sums))
        bins[place].append(item)
        sums[place] += weights[item]
    return bins


def _split_to(bins: list[list[int]], weights: Weights, count: int) -> list[list[int]]:
    """Halve the heaviest bin that holds several items until there are ``count``; no bin grows."""
    while len(bins) < count:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(weights[i] for i in b))
        halves = shares([weights[i] for i in heaviest], 2)
        bins = [b for b in bins if b is not heaviest] + [[heaviest[i] for i in half] for half in halves]
    return bins
