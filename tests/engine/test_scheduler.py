"""Admission, preemption and compaction, without any tensor."""

from __future__ import annotations

import random
from concurrent.futures import Future

from areno.engine.rollout.scheduler import COLUMN_STEP, Move, Scheduler
from areno.engine.rollout.sequence import SampleGroup, Sequence
from areno.types import SamplingParams

TOKENS = 10_000


def group(prompt_length, members=1):
    made = SampleGroup(list(range(prompt_length)), SamplingParams(max_new_tokens=1000), frozenset(), Future())
    made.members = [Sequence(made, seed) for seed in range(members)]
    return made


def test_samples_of_one_prompt_share_a_prefill():
    scheduler = Scheduler(budget_tokens=10_000, max_running=10)
    first, second = group(5, 3), group(7, 2)
    scheduler.waiting.extend(first.members + second.members)
    assert [len(shared) for shared in scheduler.admit(TOKENS)] == [3, 2]
    assert [s.slot for s in scheduler.running] == [0, 1, 2, 3, 4]


def test_admission_stops_at_the_budget_and_at_the_number_of_slots():
    scheduler = Scheduler(budget_tokens=2 * COLUMN_STEP, max_running=10)
    scheduler.waiting.extend(group(5, 5).members)
    assert len(scheduler.admit(TOKENS)[0]) == 2
    scheduler = Scheduler(budget_tokens=10_000, max_running=3)
    scheduler.waiting.extend(group(5, 5).members)
    assert len(scheduler.admit(TOKENS)[0]) == 3


def test_one_prefill_call_stays_within_its_token_limit():
    scheduler = Scheduler(budget_tokens=10**6, max_running=100)
    scheduler.waiting.extend([group(8).members[0] for _ in range(5)])
    assert [len(scheduler.admit(20)) for _ in range(3)] == [2, 2, 1]


def test_a_context_longer_than_a_call_is_prefilled_alone_with_the_samples_that_share_it():
    scheduler = Scheduler(budget_tokens=10**6, max_running=100)
    long, short = group(50, 3), group(4)
    scheduler.waiting.extend([*group(8).members, *long.members, *short.members])
    assert len(scheduler.admit(20)) == 1
    assert scheduler.admit(20) == []
    assert scheduler.chunked_prefill.members == long.members
    assert [s.slot for s in scheduler.live()] == [0, 1, 2, 3]
    assert scheduler.admit(20) == [], "no other prompt overtakes it"
    scheduler.chunked_prefill.done = 40
    moves = scheduler.remove([scheduler.running[0]])
    assert [(m.source, m.target, m.length) for m in moves] == [(1, 0, 40), (2, 1, 40), (3, 2, 40)]
    assert scheduler.remove([long.members[1]]) == [Move(2, 1, 40)]
    assert scheduler.finish_chunked_prefill() == [long.members[0], long.members[2]]
    assert [s.slot for s in scheduler.running] == [0, 1]
    assert scheduler.admit(20) == [short.members]


def test_requeueing_keeps_the_order():
    scheduler = Scheduler(budget_tokens=10**6, max_running=100)
    first, long, last = group(8, 2), group(50, 2), group(3)
    scheduler.waiting.extend([*first.members, *long.members, *last.members])
    scheduler.admit(20)
    scheduler.admit(20)
    scheduler.requeue()
    assert list(scheduler.waiting) == [*first.members, *long.members, *last.members]
    assert scheduler.live() == []
    assert {s.slot for s in scheduler.waiting} == {-1}


def test_when_the_cache_is_full_the_youngest_goes_back_to_the_head_of_the_queue():
    scheduler = Scheduler(budget_tokens=2 * COLUMN_STEP, max_running=10)
    old, young = group(COLUMN_STEP - 1), group(COLUMN_STEP - 1)
    scheduler.waiting.extend(old.members + young.members)
    scheduler.admit(TOKENS)
    for sequence in scheduler.running:
        sequence.output += [1, 2]
    scheduler.waiting.extend(group(3).members)
    assert scheduler.make_room() == []
    assert scheduler.running == old.members
    assert scheduler.waiting[0] is young.members[0]
    assert scheduler.preemptions == 1


def test_moves_keep_every_live_sequence_in_its_slot():
    rng = random.Random(0)
    for _ in range(200):
        scheduler = Scheduler(budget_tokens=10**9, max_running=100)
        members = [group(rng.randint(1, 9)).members[0] for _ in range(rng.randint(1, 20))]
        scheduler.waiting.extend(members)
        scheduler.admit(TOKENS)
        slots = {s.slot: s for s in members}
        finished = rng.sample(members, rng.randint(0, len(members)))
        for move in scheduler.remove(finished):
            slots[move.target] = slots[move.source]
            assert move.length == slots[move.target].length
        live = [s for s in members if s not in finished]
        assert sorted(s.slot for s in live) == list(range(len(live)))
        assert all(slots[s.slot] is s and scheduler.running[s.slot] is s for s in live)
        assert all(s.slot == -1 for s in finished)
