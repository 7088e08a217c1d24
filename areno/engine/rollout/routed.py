"""Read the recorded expert choices of a sample before its cache slot is reused."""

from collections.abc import Iterable

from areno.engine.rollout.scheduler import Scheduler
from areno.engine.rollout.sequence import Sequence
from areno.engine.rollout.slot_cache import KVCache, SlotCache


def take_routing(cache: KVCache, sequence: Sequence, slot: int | None = None) -> None:
    """Copy expert choices from the cache to a sample, for the sample's tokens without a record.

    If a token is recomputed (under new weights or after a preemption), it keeps its first record. For an output token, this
    record is from the pass that sampled the next token. The last token has no record, because no token was sampled after it.
    ``slot`` is the sample's former slot, if the sample no longer has a slot.
    """
    at, fed, recorded = sequence.slot if slot is None else slot, sequence.length - 1, sum(map(len, sequence.routed))
    if cache.records is not None and at >= 0 and sequence.output and fed > recorded:
        sequence.routed.append(cache.routed(at, fed)[recorded:].cpu().numpy())


def take_all(cache: KVCache, sequences: Iterable[Sequence]) -> None:
    """Call :func:`take_routing` for several samples."""
    for sequence in sequences:
        take_routing(cache, sequence)


def make_room(cache: SlotCache, scheduler: Scheduler) -> bool:
    """Preempt samples until the next decode step fits the budget. Returns whether a running sample was preempted."""
    running = [(sequence, sequence.slot) for sequence in scheduler.running]
    moves = scheduler.make_room()
    for sequence, slot in running[len(scheduler.running) :]:
        take_routing(cache, sequence, slot)
    cache.move(moves)
    return len(running) != len(scheduler.running)
