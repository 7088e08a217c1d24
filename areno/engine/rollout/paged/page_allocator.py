"""Allocate the pages of the KV cache, with a free list and reference counts. This module uses no tensors."""

from collections.abc import Iterable

from areno.engine.rollout.prefix_store import BLOCK
from areno.engine.rollout.scheduler import COLUMN_STEP, round_up
from areno.errors import EngineError

PAGE_SIZE = 16
# Reserved page: padding writes to it, and unused entries of a block table point to it.
SPARE_PAGE = 0


def pages_for(budget_tokens: int, prefix_tokens: int, max_running: int, page_size: int = PAGE_SIZE) -> int:
    """Return how many pages the KV cache needs, so that no allocation fails as long as the scheduler stays within its budget.

    The scheduler counts each live sequence as if it were as long as the longest sequence. This length is rounded up to a
    multiple of :data:`COLUMN_STEP`, which is a whole number of pages. A sequence therefore never needs more pages than the
    scheduler counts. Sequences that share pages need fewer pages. A sequence of at most ``budget_tokens`` tokens is always
    admitted if no other sequence is live. The rounded length of the admitted sequence may exceed the budget, so the budget
    is rounded up, too.

    A decode step may be launched before the tokens of the previous step are known. Each running sequence may then need one
    page more than the scheduler counts. The prefix store holds up to ``prefix_tokens`` tokens, in whole blocks. A block is a
    whole number of pages, so these tokens fill their pages completely. The returned number includes the spare page, which is
    reserved for padding.
    """
    if page_size < 1 or BLOCK % page_size or COLUMN_STEP % page_size:
        raise EngineError(
            f"page size {page_size} does not divide {BLOCK}, the block size of the prefix store; use page size {PAGE_SIZE}"
        )
    return 1 + round_up(budget_tokens, COLUMN_STEP) // page_size + max_running + prefix_tokens // page_size


class PageAllocator:
    """Allocates and frees pages by reference counts.

    ``pages`` is the number of pages, including the spare page, which is reserved for padding and never allocated.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._references = [0] * pages
        self._references[SPARE_PAGE] = 1
        self._free = list(range(pages - 1, SPARE_PAGE, -1))

    @property
    def used(self) -> int:
        """Number of allocated pages, without the spare page."""
        return self.pages - 1 - len(self._free)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """Allocate a page.

        Raises:
            EngineError: no page is free. If the allocator has as many pages as :func:`pages_for` requires for the scheduler's
                budget, the cause is a scheduler bug.
        """
        if not self._free:
            raise EngineError(
                f"all {self.pages - 1} pages of the KV cache are in use, because the scheduler has exceeded its budget"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page, and free pages that have no references."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return whether a page has more than one reference."""
        return self._references[page] > 1
