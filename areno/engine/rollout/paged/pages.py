"""Which pages of a KV cache are free, and how often each of the others is referred to. No tensor is touched here."""

from collections.abc import Iterable

from areno.engine.rollout.prefix_store import BLOCK
from areno.engine.rollout.scheduler import COLUMN_STEP, round_up
from areno.errors import EngineError

PAGE_SIZE = 16
# The page that belongs to nobody: padding writes here, and unused entries of a block table point here.
SPARE_PAGE = 0


def pages_for(budget_tokens: int, prefix_tokens: int, max_running: int, page_size: int = PAGE_SIZE) -> int:
    """Pages with which an allocation can never fail while the scheduler keeps its budget.

    The scheduler charges each live sequence for the longest one, rounded up to :data:`COLUMN_STEP`. That step is a whole
    number of pages, so a sequence never has more pages than it is charged for; sharing only lowers the number. A single
    sequence may go over the budget, but not over the budget rounded up to the step. A step that is launched before the
    tokens of the last one are known may open one more page for each running sequence. The prefix store charges whole
    blocks, and a block is a whole number of pages. The spare page comes on top.
    """
    if page_size < 1 or BLOCK % page_size or COLUMN_STEP % page_size:
        raise EngineError(
            f"the page size {page_size} must divide {BLOCK}, the block of the prefix store; use {PAGE_SIZE}"
        )
    return 1 + round_up(budget_tokens, COLUMN_STEP) // page_size + max_running + prefix_tokens // page_size


class PageAllocator:
    """Free list and reference counts of ``pages`` pages, the spare one included."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._references = [0] * pages
        self._references[SPARE_PAGE] = 1
        self._free = list(range(pages - 1, SPARE_PAGE, -1))

    @property
    def used(self) -> int:
        """Pages that somebody refers to, the spare one not counted."""
        return self.pages - 1 - len(self._free)

    def take(self) -> int:
        """A page of one's own.

        Raises:
            EngineError: there is none; with :func:`pages_for` pages that is a defect of the scheduler's accounting.
        """
        if not self._free:
            raise EngineError(
                f"all {self.pages - 1} pages of the KV cache are in use; the scheduler admitted more than its budget"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            self._references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One reference less to each page; those without any are free at once."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether a write would be seen by somebody else."""
        return self._references[page] > 1
