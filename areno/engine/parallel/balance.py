"""Assign rows to ranks or to microbatches, so that all ranks or microbatches have similar numbers of tokens."""

import heapq
from collections.abc import Sequence


def shares(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Partition items into parts of similar total weight.

    The function uses the largest differencing method (Karmarkar and Karp 1982). The result is deterministic. Weights must not
    be negative.

    Returns the sorted indices of the items in each part. A part may be empty.
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
    """Divide the rows of a batch into parts with similar numbers of tokens, and return the row indices of each part.

    Each block of ``together`` adjacent rows, such as the two rows of a preference pair, stays in one part. The last block may
    be smaller.
    """
    rows = range(len(lengths))
    blocks = [rows[start : start + together] for start in rows[::together]]
    assigned = shares([sum(lengths[row] for row in block) for block in blocks], parts)
    return [[row for block in share for row in blocks[block]] for share in assigned]
