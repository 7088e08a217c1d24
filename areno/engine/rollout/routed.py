"""Copy the recorded expert choices of a sample from the cache, before the sample's slot is reused."""

from collections.abc import Iterable

from areno.engine.rollout.scheduler import Scheduler
from areno.engine.rollout.sequence import Sequence
from areno.engine.rollout.slot_cache import KVCache, SlotCache


def take_routing(cache: KVCache, sequence: Sequence, slot: int | None = None) -> None:
    """Copy the expert choices of a sample's tokens from the cache to ``sequence.routed``, except choices copied earlier.

    The model processes an output token in the forward pass that samples the next token. This pass records the expert choices of
    the processed token. A token that is recomputed later (with new weights, or after a preemption) keeps its first record. The
    last token has no record, because no token was sampled after this token. If the sample no longer has a slot, ``slot`` is its
    former slot.
    """
    at, fed, recorded = sequence.slot if slot is None else slot, sequence.length - 1, sum(map(len, sequence.routed))
    if cache.records is not None and at >= 0 and sequence.output and fed > recorded:
        sequence.routed.append(cache.routed(at, fed)[recorded:].cpu().numpy())


def take_all(cache: KVCache, sequences: Iterable[Sequence]) -> None:
    """Call :func:`take_routing` for several samples."""
    for sequence in sequences:
        take_routing(cache, sequence)


def make_room(cache: SlotCache, scheduler: Scheduler) -> bool:
    """Preempt samples until the KV cache has room for the next decode step. Return whether a running sample was preempted."""
    running = [(sequence, sequence.slot) for sequence in scheduler.running]
    moves = scheduler.make_room()
    for sequence, slot in running[len(scheduler.running) :]:
        take_routing(cache, sequence, slot)
    cache.move(moves)
    return len(running) != len(scheduler.running)
