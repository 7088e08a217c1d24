"""Pages: reference counting, and the guarantee that a scheduler within its budget never runs out of them."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from areno.engine.rollout.paged.page_allocator import SPARE_PAGE, PageAllocator, pages_for
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.paged.plans import open_cells
from areno.engine.rollout.prefix_store import PrefixStore
from areno.engine.rollout.scheduler import Scheduler
from areno.engine.rollout.sequence import SampleGroup, Sequence
from areno.errors import EngineError
from areno.types import SamplingParams


def test_a_page_is_freed_with_its_last_reference_and_not_before():
    allocator = PageAllocator(4)
    pages = [allocator.take() for _ in range(3)]
    assert sorted(pages) == [1, 2, 3]
    allocator.share(pages[:1])
    allocator.drop(pages)
    assert allocator.used == 1
    assert not allocator.is_shared(pages[0])
    assert {allocator.take(), allocator.take()} == set(pages[1:])


def test_the_spare_page_is_never_handed_out():
    allocator = PageAllocator(50)
    assert SPARE_PAGE not in {allocator.take() for _ in range(49)}


def test_running_out_of_pages_is_an_error_that_blames_the_scheduler():
    allocator = PageAllocator(2)
    allocator.take()
    with pytest.raises(EngineError, match=r"all 1 pages .* scheduler has exceeded"):
        allocator.take()


@pytest.mark.parametrize("size", [0, 3, 12, 32])
def test_a_page_size_for_which_the_guarantee_does_not_hold_is_refused(size):
    with pytest.raises(EngineError, match=f"page size {size}"):
        pages_for(1000, 0, 8, size)


class Simulation:
    """A scheduler on a paged cache without tensors: prompts arrive, decode, share pages, end and are preempted."""

    def __init__(self, seed: int, page_size: int, budget: int, running: int, prefix_tokens: int) -> None:
        self.random = random.Random(seed)
        self.budget = budget
        self.scheduler = Scheduler(budget, running)
        self.prefixes = PrefixStore(prefix_tokens)
        self.cache = PagedCache(pages_for(budget, prefix_tokens, running, page_size), page_size=page_size)
        self.most = 0
        self.cached: dict[Sequence, int] = {}

    def submit(self) -> None:
        prompt = [self.random.randrange(6)] * self.random.randint(1, self.budget // 2)
        new = self.random.randint(1, min(150, self.budget - len(prompt)))
        group = SampleGroup(prompt, SamplingParams(max_new_tokens=new), frozenset(), Future())
        self.scheduler.waiting.extend(Sequence(group, 0) for _ in range(self.random.randint(1, 6)))

    def prefill(self, members: list[Sequence], start: int, stop: int) -> None:
        self.cache.reserve(self.scheduler.held(), self.scheduler.columns())
        slots = [s.slot for s in members]
        context = members[0].context
        hit = self.prefixes.find(context, 0) if not start else None
        if hit is not None:
            self.cache.restore(hit.snapshot, slots, hit.length)
            start = hit.length
        for slot in slots[1:] if start else slots:
            self.cache.cut(slot, start)
        self.cache.extend(slots[0], start, stop)
        self.cache.link(slots[0], slots[1:])

    def turn(self) -> None:
        scheduler = self.scheduler
        chunked = scheduler.chunked_prefill
        if chunked is not None:
            start, chunked.done = chunked.done, min(chunked.done + 40, len(chunked.members[0].context))
            self.prefill(chunked.members, start, chunked.done)
            if chunked.done == len(chunked.members[0].context):
                self.push(scheduler.finish_chunked_prefill())
        for members in scheduler.admit(100):
            self.prefill(members, 0, len(members[0].context))
            self.push(members)
        self.settle(scheduler.make_room())
        if scheduler.running:
            # One position beyond the known tokens, as in an overlapped step.
            ahead = [s.length - 1 + self.random.randint(0, 1) for s in scheduler.running]
            self.cache.reserve(scheduler.held(), max(ahead) + 1)
            open_cells(self.cache, ahead)
            self.most = max(self.most, self.cache.allocator.used)
            self.push(list(scheduler.running))

    def push(self, members: list[Sequence]) -> None:
        done = [s for s in members if s.push(7, -1.0, 0.0, 0)]
        for sequence in done:
            context = sequence.context[:-1]
            if not self.prefixes.covers(context, 0):
                self.prefixes.add(context, self.cache.snapshot(sequence.slot, len(context)), 0)
        self.settle(self.scheduler.remove(done))

    def settle(self, moves: list) -> None:
        self.cache.move(moves)
        self.cache.keep(self.scheduler.held())


@pytest.mark.parametrize(("seed", "page_size"), [(0, 16), (1, 16), (2, 4), (3, 1), (4, 8)])
def test_pages_never_run_out_while_the_scheduler_stays_within_its_budget(seed, page_size):
    life = Simulation(seed, page_size, budget=1000, running=12, prefix_tokens=160)
    for _ in range(400):
        if life.random.random() < 0.3:
            life.submit()
        life.turn()  # raises when there is no page
    assert life.scheduler.preemptions > 0, "the budget was never under pressure"
    assert life.most > 0.4 * (life.cache.allocator.pages - 1), "most of the pool stayed unused"
    life.scheduler.requeue()
    life.cache.keep(0)
    life.prefixes.clear()
    assert life.cache.allocator.used == 0


def test_the_guarantee_holds_without_a_page_to_spare():
    """Rows that fill whole column steps, the step ahead and a full prefix store together need every page."""
    budget, running, prefix_tokens = 12 * 64, 12, 160
    cache = PagedCache(pages_for(budget, prefix_tokens, running))
    cache.reserve(13, 160)
    cache.extend(12, 0, prefix_tokens)
    stored = cache.snapshot(12, prefix_tokens)
    cache.keep(0)
    for row in range(running):
        cache.extend(row, 0, 65)
    assert cache.allocator.used == cache.allocator.pages - 1
    assert len(stored.pages) == 10
