"""Paged KV cache. Each row of a block table lists the pages of one sequence.

The rollout loop uses this cache like a :class:`~areno.engine.rollout.slot_cache.SlotCache`, with rows as slots. Samples of one
prompt share the prompt's pages. Before a sample writes to a shared, partly filled page, the page is copied (copy-on-write). A
prefix in the prefix store (:class:`PageSnapshot`) holds references to its pages. If rows of the batch move, entries of the
block table move, but keys and values stay in place. A page is free if nothing refers to the page. The memory of all pages is
allocated once, so the addresses in CUDA graphs stay valid.
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
    """The pages with the first tokens of a sequence. The pages stay cached as long as this object exists."""

    pages: tuple[int, ...]
    allocator: PageAllocator


class PagedCache(KVCache):
    """Holds keys and values [pages, page_size, heads, size] for each layer, and the recurrent states of each row.

    Args:
        pages: number of pages; see :func:`~areno.engine.rollout.paged.page_allocator.pages_for`.
        device: device of the cache.
        page_size: number of tokens per page.
        rows: initial number of rows of the block table.
        columns: number of tokens that each row of the block table initially has space for. If the block table grows later,
            captured CUDA graphs become invalid.

    Attributes:
        table: block table [rows, pages per row], int32, on the device. The entries after the last page of a row are not used.
            They are outdated, or point to page 0, which is reserved for padding.
        reclaim: function that is called if no page is free. The function tries to free pages, and returns whether another call
            might free more pages.
        epoch: counter that is incremented when a tensor of the cache gets new memory. Captured CUDA graphs are then invalid.
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
        """Grow the block table if necessary, so that it has space for ``rows`` sequences of ``columns`` tokens each.

        No pages are allocated.
        """
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
        """Free all memory of the cache. Existing snapshots become invalid."""
        epoch, pages, (rows, columns), records = self.epoch, self.allocator.pages, self._initial, self.records
        reclaim = self.reclaim
        self.__init__(pages, self.device, self.page_size, rows=rows, columns=columns)  # type: ignore[misc]
        self.epoch, self.records, self.reclaim = epoch + 1, records, reclaim

    def resize(self, pages: int, columns: int) -> None:
        """Free the cache, and change the number of pages to ``pages``.

        ``columns`` is the number of tokens that each row of the new block table initially has space for.
        """
        self._initial = self._initial[0], columns
        self.allocator = PageAllocator(pages)
        self.release()

    def nbytes(self) -> int:
        """Return the total size in bytes of the pages, the recurrent states and the block table."""
        return super().nbytes() + self.table.numel() * self.table.element_size()

    # -- rows and pages --------------------------------------------------------------------------------------------

    def pages_of(self, row: int) -> list[int]:
        """Return the pages of a row, in the order of the row's tokens."""
        return list(self._rows[row])

    def extend(self, row: int, start: int, stop: int) -> None:
        """Prepare a row for writing to positions ``start`` to ``stop - 1``: copy shared pages, and allocate missing pages.

        Raises:
            EngineError: the block table is too narrow, or no page is free.
        """
        if stop > self.columns:
            raise EngineError(
                f"the block table has {self.columns} columns, but {stop} columns are needed; call reserve() before extend()"
            )
        pages = self._rows[row]
        first, changed = start // self.page_size, len(pages)
        for index in range(len(pages) - 1, first - 1, -1):
            if self.allocator.is_shared(pages[index]):
                pages[index], changed = self._private_copy(pages[index]), index
        while len(pages) * self.page_size < stop:
            pages.append(self._take())
        self._mark(row, changed)

    def _take(self) -> int:
        while not self.allocator.free and self.reclaim():
            pass
        return self.allocator.take()

    def _private_copy(self, page: int) -> int:
        copy = self._take()
        self._copies[copy] = self._copies.get(page, page)
        self.allocator.drop([page])
        return copy

    def cut(self, row: int, length: int) -> None:
        """Remove all pages of a row, except the pages that the row's first ``length`` tokens fill completely."""
        keep = length // self.page_size
        self.allocator.drop(self._rows[row][keep:])
        del self._rows[row][keep:]

    def link(self, source: int, targets: Seq[int]) -> None:
        """Share all pages of the row ``source`` with the rows ``targets``."""
        for target in targets:
            self._refer(target, self._rows[source])

    def move(self, moves: Seq[Move]) -> None:
        """Move rows of the block table. Keys and values stay in place."""
        for move in moves:
            self.allocator.drop(self._rows[move.target])
            self._rows[move.target], self._rows[move.source] = self._rows[move.source], []
            self._mark(move.target, 0)
            if self.states.tensors():
                self.states.copy(move.source, torch.tensor([move.target], device=self.device))

    def keep(self, rows: int) -> None:
        """Free the pages of all rows except the first ``rows`` rows."""
        for row in range(rows, self.slots):
            self.cut(row, 0)

    def snapshot(self, slot: int, length: int) -> PageSnapshot:
        """Return a reference to the pages that the first ``length`` tokens of ``slot`` fill completely. Nothing is copied."""
        pages = tuple(self._rows[slot][: length // self.page_size])
        snapshot = PageSnapshot(pages, self.allocator)
        self.allocator.share(pages)
        weakref.finalize(snapshot, self.allocator.drop, pages)
        return snapshot

    def restore(self, snapshot: PageSnapshot, slots: Seq[int], length: int) -> None:
        """Let rows of the block table use pages of a snapshot instead of their own pages.

        ``slots`` contains the indices of the rows. Each row gets the pages that hold the first ``length`` tokens of the
        snapshot. ``length`` must be a multiple of the page size. Nothing is copied.
        """
        if snapshot.allocator is not self.allocator:
            raise EngineError(
                "the snapshot was taken before the KV cache was released; clear the prefix store when you release the cache"
            )
        for slot in slots:
            self._refer(slot, snapshot.pages[: length // self.page_size])

    def _refer(self, row: int, pages: Seq[int]) -> None:
        self.allocator.share(pages)
        self.allocator.drop(self._rows[row])
        self._rows[row] = list(pages)
        self._mark(row, 0)

    def _mark(self, row: int, first: int) -> None:
        begin = row * self.table.shape[1]
        self._changed.update((begin + i, page) for i, page in enumerate(self._rows[row][first:], first))

    def publish(self) -> None:
        """Run the pending page copies on the device, and upload the changed entries of the block table."""
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
        """Return the cell [N] of each token, which is the token's index in the concatenated pages.

        ``rows`` [N] are the tokens' rows in the block table, and ``positions`` [N] are the tokens' positions in the context. A
        position of -1 marks a padding token. The cell of a padding token is the first cell of the spare page. This page is
        reserved for padding.
        """
        at = positions.clamp(min=0)
        pages = self.table[rows, at // self.page_size].long()
        cells = pages * self.page_size + at % self.page_size
        return torch.where(positions >= 0, cells, SPARE_PAGE * self.page_size)

    def write(self, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys ``k`` and values ``v`` [N, heads, size] in ``cells`` [N]."""
        keys, values = self._pool(self.keys, layer, k), self._pool(self.values, layer, v)
        keys.flatten(0, 1).index_copy_(0, cells, k)
        values.flatten(0, 1).index_copy_(0, cells, v)

    def _keys_of(self, layer: int, slot: int, length: int) -> Tensor:
        positions = torch.arange(length, device=self.device)
        return self.keys[layer].flatten(0, 1)[self.cells(torch.full_like(positions, slot), positions), 0]

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [pages, page_size, heads, size] of a layer.

        Call this method only after :meth:`write` has stored keys and values of the layer.
        """
        return self.keys[layer], self.values[layer]

    def _pool(self, pools: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        if layer not in pools:
            pools[layer] = like.new_zeros(self.allocator.pages, self.page_size, *like.shape[1:])
            self.epoch += 1
        return pools[layer]
