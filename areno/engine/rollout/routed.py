"""Reading what the routers have chosen for a sample's tokens, before its place in the cache is somebody else's."""

from collections.abc import Iterable

from areno.engine.rollout.kv_cache import KVCache, SlotCache
from areno.engine.rollout.scheduler import Scheduler
from areno.engine.rollout.sequence import Sequence


def take_routing(cache: KVCache, sequence: Sequence, slot: int | None = None) -> None:
    """Give a sample the recorded choices of its tokens, but for those that it has already.

    A token that is computed anew, under other weights or after a preemption, keeps its first record: that is of the pass which
    its successor was sampled from. The last token has not been fed to the model yet. ``slot``: where the sample was, if it has
    left.
    """
    place, fed, known = sequence.slot if slot is None else slot, sequence.length - 1, sum(map(len, sequence.routed))
    if cache.records is not None and place >= 0 and sequence.output and fed > known:
        sequence.routed.append(cache.routed(place, fed)[known:].cpu().numpy())


def take_all(cache: KVCache, sequences: Iterable[Sequence]) -> None:
    """The same for several."""
    for sequence in sequences:
        take_routing(cache, sequence)


def make_room(cache: SlotCache, scheduler: Scheduler) -> bool:
    """Send samples back to the queue until the next decode step fits; returns whether any that ran is among them."""
    running = [(sequence, sequence.slot) for sequence in scheduler.running]
    moves = scheduler.make_room()
    for sequence, slot in running[len(scheduler.running) :]:
        take_routing(cache, sequence, slot)
    cache.move(moves)
    return len(running) != len(scheduler.running)
