"""Page allocation of the KV cache: free list and reference counts. Touches no tensors."""

from collections.abc import Iterable

from areno.engine.rollout.prefix_store import BLOCK
from areno.engine.rollout.scheduler import COLUMN_STEP, round_up
from areno.errors import EngineError

PAGE_SIZE = 16
# Reserved page: padding writes to it, and unused entries of a block table point to it.
SPARE_PAGE = 0


def pages_for(budget_tokens: int, prefix_tokens: int, max_running: int, page_size: int = PAGE_SIZE) -> int:
    """Number of pages with which allocation never fails, provided that the scheduler keeps to its budget.

    The scheduler charges each live sequence the longest length, rounded up to :data:`COLUMN_STEP`, a whole number of pages.
    So no sequence has more pages than it is charged for; sharing only lowers the number. A single sequence may exceed the
    budget, but not the budget rounded up to :data:`COLUMN_STEP`. A decode step launched before the tokens of the previous one
    are known may allocate one more page per running sequence. The prefix store charges whole blocks, each a whole number of
    pages. The spare page is extra.
    """
    if page_size < 1 or BLOCK % page_size or COLUMN_STEP % page_size:
        raise EngineError(
            f"the page size {page_size} must divide {BLOCK}, the block size of the prefix store; use {PAGE_SIZE}"
        )
    return 1 + round_up(budget_tokens, COLUMN_STEP) // page_size + max_running + prefix_tokens // page_size


class PageAllocator:
    """Free list and reference counts of ``pages`` pages, including the spare one."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._references = [0] * pages
        self._references[SPARE_PAGE] = 1
        self._free = list(range(pages - 1, SPARE_PAGE, -1))

    @property
    def used(self) -> int:
        """Allocated pages, without the spare one."""
        return self.pages - 1 - len(self._free)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """Allocate a page.

        Raises:
            EngineError: no page is free; with :func:`pages_for` pages, that is a bug in the scheduler's accounting.
        """
        if not self._free:
            raise EngineError(
                f"all {self.pages - 1} pages of the KV cache are in use; the scheduler admitted more than its budget"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page, and free pages without references."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether a page has several references."""
        return self._references[page] > 1
