"""Paged KV cache: rows of a block table instead of slots.

The loop uses it like a :class:`~areno.engine.rollout.slot_cache.SlotCache`. Samples of one prompt share the prompt's pages.
When a sample writes to a shared, partly filled page, the page is copied (copy-on-write). Snapshots are references to pages. A
compaction moves rows of the table. A page is free once its last reference is dropped. The pool is allocated once at full
size, so that the addresses in CUDA graphs remain valid.
"""

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.engine.rollout.paged.page_allocator import PAGE_SIZE, SPARE_PAGE, PageAllocator
from areno.engine.rollout.scheduler import COLUMN_STEP, Move, round_up
from areno.engine.rollout.slot_cache import ROW_STEP, KVCache
from areno.errors import EngineError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PageSnapshot:
    """Pages of a context's prefix, which stay cached while this object exists."""

    pages: tuple[int, ...]
    allocator: PageAllocator


class PagedCache(KVCache):
    """Keys and values [pages, page_size, heads, size] per layer, and the recurrent states of each row.

    Args:
        pages: size of the pool; see :func:`~areno.engine.rollout.paged.page_allocator.pages_for`.
        device: device of the pool.
        page_size: tokens per page.
        rows: initial number of rows of the block table.
        columns: initial number of tokens per row. Growing the table later invalidates captured graphs.

    Attributes:
        table: block table [slots, width] int32 on the device; entries beyond a row's end are stale or point to the spare
            page.
        reclaim: called when no page is free. It tries to free pages, and returns whether another call might free more.
        epoch: incremented when a tensor that captured graphs read moves to other memory.
    """

    def __init__(
        self,
        pages: int,
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
        *,
        rows: int = 0,
        columns: int = 0,
    ) -> None:
        super().__init__(device)
        self._initial = rows, columns
        self.page_size = page_size
        self.allocator = PageAllocator(pages)
        self.reclaim: Callable[[], bool] = lambda: False
        self.table = torch.zeros(0, 0, dtype=torch.int32, device=self.device)
        self.epoch = 0
        self._rows: list[list[int]] = []
        self._changed: dict[int, int] = {}  # cells of the flat table not yet copied to the device
        self._copies: dict[int, int] = {}  # target page -> source page

    # -- room ------------------------------------------------------------------------------------------------------

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the block table to ``rows`` sequences of ``columns`` tokens, without allocating pages."""
        if not self.slots:
            rows, columns = max(rows, self._initial[0]), max(columns, self._initial[1])
        slots = max(self.slots, round_up(rows, ROW_STEP))
        if columns > self.columns:
            columns = round_up(max(columns, 2 * self.columns), COLUMN_STEP)
        columns = max(columns, self.columns)
        if (slots, columns) == (self.slots, self.columns):
            return
        if slots > self.slots:
            self.states.grow(slots)
        self.slots, self.columns = slots, columns
        width = columns // self.page_size
        self.table = torch.full((slots, width), SPARE_PAGE, dtype=torch.int32, device=self.device)
        self._rows += [[] for _ in range(slots - len(self._rows))]
        self._changed.clear()
        for row in range(slots):
            self._mark(row, 0)
        self.epoch += 1

    def release(self) -> None:
        """Free all memory. Earlier snapshots become invalid."""
        epoch, pages, (rows, columns), records = self.epoch, self.allocator.pages, self._initial, self.records
        reclaim = self.reclaim
        self.__init__(pages, self.device, self.page_size, rows=rows, columns=columns)  # type: ignore[misc]
        self.epoch, self.records, self.reclaim = epoch + 1, records, reclaim

    def resize(self, pages: int, columns: int) -> None:
        """Change the number of pages and the initial row length, and drop the cache."""
        self._initial = self._initial[0], columns
        self.allocator = PageAllocator(pages)
        self.release()

    def nbytes(self) -> int:
        """Return the size in bytes of the pool, the recurrent states and the block table."""
        return super().nbytes() + self.table.numel() * self.table.element_size()

    # -- rows and pages --------------------------------------------------------------------------------------------

    def pages_of(self, row: int) -> list[int]:
        """Return the pages of a row in context order."""
        return list(self._rows[row])

    def extend(self, row: int, start: int, stop: int) -> None:
        """Prepare a row for writing to positions ``start`` to ``stop - 1``: copy shared pages and allocate missing pages.

        Raises:
            EngineError: the block table is too narrow, or no page is free.
        """
        if stop > self.columns:
            raise EngineError(f"the block table has {self.columns} columns, but needs {stop}; call reserve first")
        pages = self._rows[row]
        first, changed = start // self.page_size, len(pages)
        for index in range(len(pages) - 1, first - 1, -1):
            if self.allocator.is_shared(pages[index]):
                pages[index], changed = self._private_copy(pages[index]), index
        while len(pages) * self.page_size < stop:
            pages.append(self._take())
        self._mark(row, changed)

    def _take(self) -> int:
        """Allocate a page, after reclaiming pages if none is free."""
        while not self.allocator.free and self.reclaim():
            pass
        return self.allocator.take()

    def _private_copy(self, page: int) -> int:
        """Allocate a private copy of ``page``, and drop one reference to ``page``. :meth:`publish` fills the copy."""
        copy = self._take()
        self._copies[copy] = self._copies.get(page, page)
        self.allocator.drop([page])
        return copy

    def cut(self, row: int, length: int) -> None:
        """Keep only the whole pages of a row's first ``length`` tokens."""
        keep = length // self.page_size
        self.allocator.drop(self._rows[row][keep:])
        del self._rows[row][keep:]

    def link(self, source: int, targets: Seq[int]) -> None:
        """Share all pages of ``source`` with other rows."""
        for target in targets:
            self._refer(target, self._rows[source])

    def move(self, moves: Seq[Move]) -> None:
        """Carry out a compaction by moving rows of the block table. Keys and values stay in place."""
        for move in moves:
            self.allocator.drop(self._rows[move.target])
            self._rows[move.target], self._rows[move.source] = self._rows[move.source], []
            self._mark(move.target, 0)
            if self.states.tensors():
                self.states.copy(move.source, torch.tensor([move.target], device=self.device))

    def keep(self, rows: int) -> None:
        """Free the pages of all but the first ``rows`` rows."""
        for row in range(rows, self.slots):
            self.cut(row, 0)

    def snapshot(self, slot: int, length: int) -> PageSnapshot:
        """Reference the whole pages of a row's first ``length`` tokens, without a copy."""
        pages = tuple(self._rows[slot][: length // self.page_size])
        snapshot = PageSnapshot(pages, self.allocator)
        self.allocator.share(pages)
        weakref.finalize(snapshot, self.allocator.drop, pages)
        return snapshot

    def restore(self, snapshot: PageSnapshot, slots: Seq[int], length: int) -> None:
        """Make rows begin with the first ``length`` tokens of a snapshot. ``length`` must be a multiple of the page size."""
        if snapshot.allocator is not self.allocator:
            raise EngineError(
                "a prefix was cached before the KV cache was released; clear the prefix store when releasing the cache"
            )
        for slot in slots:
            self._refer(slot, snapshot.pages[: length // self.page_size])

    def _refer(self, row: int, pages: Seq[int]) -> None:
        self.allocator.share(pages)
        self.allocator.drop(self._rows[row])
        self._rows[row] = list(pages)
        self._mark(row, 0)

    def _mark(self, row: int, first: int) -> None:
        """Mark a row's block-table entries as changed, starting at entry ``first``."""
        begin = row * self.table.shape[1]
        self._changed.update((begin + i, page) for i, page in enumerate(self._rows[row][first:], first))

    def publish(self) -> None:
        """Perform the pending page copies on the device, and upload the changed block-table entries."""
        if self._copies:
            pairs = torch.tensor([list(self._copies), list(self._copies.values())])
            pairs = pairs.to(self.device, non_blocking=True)
            for pool in (*self.keys.values(), *self.values.values()):
                pool[pairs[0]] = pool[pairs[1]]
            self._copies.clear()
        if self._changed:
            cells = torch.tensor([list(self._changed), list(self._changed.values())])
            cells = cells.to(self.device, non_blocking=True)
            self.table.view(-1).index_copy_(0, cells[0], cells[1].int())
            self._changed.clear()

    # -- cells -----------------------------------------------------------------------------------------------------

    def cells(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the flat-pool cells [N] of ``positions`` [N] in ``rows`` [N]. Position -1 maps to the spare page."""
        at = positions.clamp(min=0)
        pages = self.table[rows, at // self.page_size].long()
        cells = pages * self.page_size + at % self.page_size
        return torch.where(positions >= 0, cells, SPARE_PAGE * self.page_size)

    def write(self, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, heads, size] in ``cells`` [N] of the flat pool."""
        keys, values = self._pool(self.keys, layer, k), self._pool(self.values, layer, v)
        keys.flatten(0, 1).index_copy_(0, cells, k)
        values.flatten(0, 1).index_copy_(0, cells, v)

    def _keys_of(self, layer: int, slot: int, length: int) -> Tensor:
        positions = torch.arange(length, device=self.device)
        return self.keys[layer].flatten(0, 1)[self.cells(torch.full_like(positions, slot), positions), 0]

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [pages, page_size, heads, size] of a layer that has been written to."""
        return self.keys[layer], self.values[layer]

    def _pool(self, pools: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        if layer not in pools:
            pools[layer] = like.new_zeros(self.allocator.pages, self.page_size, *like.shape[1:])
            self.epoch += 1
        return pools[layer]
