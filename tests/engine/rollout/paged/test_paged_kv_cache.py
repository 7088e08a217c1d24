"""The paged cache against a model of what each row should hold."""

from __future__ import annotations

import random

import pytest
import torch

from areno.engine.rollout.paged.backends import gathered
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.paged.plans import open_cells
from areno.engine.rollout.scheduler import Move
from areno.errors import EngineError

SIZE = 4


class Pair:
    """A cache of one layer and, per row, the plain list of numbers that it should hold."""

    def __init__(self, pages: int = 200, rows: int = 8, columns: int = 128) -> None:
        self.cache = PagedCache(pages, page_size=SIZE)
        self.cache.reserve(rows, columns)
        self.rows: list[list[float]] = [[] for _ in range(rows)]
        self.written = 0

    def append(self, row: int, count: int = 1) -> None:
        start = len(self.rows[row])
        self.cache.extend(row, start, start + count)
        self.cache.publish()
        positions = torch.arange(start, start + count)
        values = torch.arange(self.written, self.written + count).float()
        self.written += count
        self.rows[row] += values.tolist()
        cells = self.cache.cells(torch.full_like(positions, row), positions)
        self.cache.write(0, cells, values.view(-1, 1, 1), -values.view(-1, 1, 1))

    def check(self) -> None:
        self.cache.publish()
        keys, values = (gathered(pool, self.cache.table, self.cache.columns) for pool in self.cache.pool(0))
        for row, expected in enumerate(self.rows):
            assert keys[row, 0, : len(expected), 0].tolist() == expected
            assert values[row, 0, : len(expected), 0].tolist() == [-x for x in expected]

    def pages(self) -> set[int]:
        return {page for row in range(len(self.rows)) for page in self.cache.pages_of(row)}


def test_rows_hold_the_right_values_after_random_operations():
    rng = random.Random(0)
    pair = Pair()
    kept: list[tuple] = []
    for _ in range(1500):
        kind = rng.choice(["append"] * 5 + ["link", "cut", "move", "keep", "snapshot", "restore", "forget"])
        row, other = rng.sample(range(len(pair.rows)), 2)
        if kind == "append" and len(pair.rows[row]) < 100:
            pair.append(row, rng.randint(1, 9))
        elif kind == "link":
            pair.cache.link(row, [other])
            pair.rows[other] = list(pair.rows[row])
        elif kind == "cut":
            length = rng.randint(0, len(pair.rows[row]))
            pair.cache.cut(row, length)
            pair.rows[row] = pair.rows[row][: length // SIZE * SIZE]
        elif kind == "move":
            pair.cache.move([Move(row, other, len(pair.rows[row]))])
            pair.rows[other], pair.rows[row] = pair.rows[row], []
        elif kind == "keep" and rng.random() < 0.1:
            pair.cache.keep(5)
            pair.rows[5:] = [[], [], []]
        elif kind == "snapshot":
            kept.append((pair.cache.snapshot(row, len(pair.rows[row])), list(pair.rows[row])))
        elif kind == "restore" and kept:
            chosen = rng.randrange(len(kept))
            content = kept[chosen][1]
            length = rng.randint(0, len(content) // SIZE) * SIZE
            pair.cache.restore(kept[chosen][0], [row, other], length)
            pair.rows[row], pair.rows[other] = content[:length], content[:length]
        elif kind == "forget" and len(kept) > 5:
            kept.pop(rng.randrange(len(kept)))
        if pair.written:
            pair.check()
        held = {page for entry in kept for page in entry[0].pages}
        assert pair.cache.allocator.used == len(pair.pages() | held), (
            f"pages leaked or were freed too early at a {kind}"
        )


def test_samples_of_a_prompt_share_its_pages_until_they_write():
    pair = Pair()
    pair.append(0, 10)
    pair.cache.link(0, [1, 2, 3])
    assert pair.cache.allocator.used == 3
    open_cells(pair.cache, [10, 10, 10, 10])
    full, last = zip(*((pages[:2], pages[2]) for pages in map(pair.cache.pages_of, range(4))), strict=True)
    assert len(set(map(tuple, full))) == 1
    assert len(set(last)) == 4
    assert pair.cache.allocator.used == 2 + 4, "the last writer keeps the page that the others left"


def test_a_cut_keeps_whole_pages_only():
    pair = Pair()
    pair.append(0, 11)
    pages = pair.cache.pages_of(0)
    pair.cache.cut(0, 11)
    assert pair.cache.pages_of(0) == pages[:2]
    pair.cache.cut(0, 4)
    assert pair.cache.pages_of(0) == pages[:1]


def test_a_snapshot_copies_nothing_and_is_freed_with_its_last_reference():
    pair = Pair()
    pair.append(0, 11)
    snapshot = pair.cache.snapshot(0, 11)
    assert pair.cache.allocator.used == 3
    pair.cache.keep(0)
    assert pair.cache.allocator.used == 2
    del snapshot
    assert pair.cache.allocator.used == 0


def test_a_compaction_moves_no_key():
    pair = Pair()
    pair.append(5, 9)
    before, pages = pair.cache.pool(0)[0].clone(), pair.cache.pages_of(5)
    pair.cache.move([Move(5, 0, 9)])
    assert pair.cache.pages_of(0) == pages
    assert torch.equal(pair.cache.pool(0)[0], before)


def test_growing_the_block_table_keeps_rows_and_invalidates_graphs():
    pair = Pair(rows=8, columns=64)
    pair.append(3, 40)
    epoch, table = pair.cache.epoch, pair.cache.table
    pair.cache.reserve(20, 70)
    pair.rows += [[] for _ in range(pair.cache.slots - 8)]
    assert (pair.cache.slots, pair.cache.columns) == (24, 128)
    assert pair.cache.epoch > epoch
    pair.check()
    epoch, table = pair.cache.epoch, pair.cache.table
    pair.cache.reserve(8, 64)
    assert (pair.cache.epoch, pair.cache.table.data_ptr()) == (epoch, table.data_ptr())


def test_writing_beyond_the_block_table_is_refused():
    with pytest.raises(EngineError, match="has 64 columns, but 65 columns are needed"):
        Pair(columns=64).cache.extend(0, 60, 65)


def test_padding_writes_to_the_spare_page():
    pair = Pair()
    pair.append(0, 3)
    cells = pair.cache.cells(torch.tensor([0, 0]), torch.tensor([-1, 2]))
    assert cells[0] < SIZE <= cells[1]


def test_release_gives_the_memory_back_and_old_snapshots_are_refused():
    pair = Pair()
    pair.append(0, 8)
    snapshot, epoch = pair.cache.snapshot(0, 8), pair.cache.epoch
    assert pair.cache.nbytes() > 200 * SIZE * 2 * 4
    pair.cache.release()
    assert pair.cache.nbytes() == 0
    assert pair.cache.epoch > epoch
    pair.cache.reserve(8, 64)
    with pytest.raises(EngineError, match="before the KV cache was released"):
        pair.cache.restore(snapshot, [0], 8)
    del snapshot
    assert pair.cache.allocator.used == 0
