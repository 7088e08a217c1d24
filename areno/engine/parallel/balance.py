"""Balanced partitions: which rank trains or scores which rows."""

import heapq
from collections.abc import Sequence


def shares(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Partition items so that the sums of weights differ little (Karmarkar and Karp 1982, largest differencing method).

    Each item starts as a tuple of parts, all but one of them empty. The two tuples with the largest differences are merged,
    heaviest part to lightest, until one tuple remains. The result is deterministic.

    Returns the indices of each part's items, ascending; parts may be empty. Weights must not be negative.
    """
    if parts == 1:
        return [list(range(len(weights)))]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        alone: list[tuple[int, list[int]]] = [(weight, [index])] + [(0, []) for _ in range(parts - 1)]
        heapq.heappush(heap, (-weight, index, alone))
    while len(heap) > 1:
        _, order, left = heapq.heappop(heap)
        right = heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    assigned = [items for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
    return [sorted(items) for items in assigned]


def shares_of_rows(lengths: Sequence[int], parts: int, together: int = 1) -> list[list[int]]:
    """Partition rows by token count; return row indices. Blocks of ``together`` adjacent rows (a pair) stay in one part."""
    blocks = range(0, len(lengths), together)
    assigned = shares([sum(lengths[start : start + together]) for start in blocks], parts)
    return [[blocks[block] + row for block in share for row in range(together)] for share in assigned]
