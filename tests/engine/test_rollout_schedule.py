"""Each sample is what it would be alone, whatever the schedule: chunks, prefixes, preemption, weight swaps, cancels."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout import loop as loop_module
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.prefix_store import PrefixStore
from areno.errors import EngineError
from areno.types import Request, SamplingParams
from tests.support.cli import start_text
from tests.support.examples import some_quick
from tests.support.tiny import VOCAB, tiny_module

REPO = Path(__file__).parents[2]
FAMILIES = some_quick(["llama", "qwen3_5", "gemma3", "gpt_oss"], "qwen3_5")


@pytest.fixture
def make_loop():
    loops = []

    def make(family="llama", *, budget=10**6, running=64, prefix_tokens=0, seed=0):
        model = prepare(tiny_module(family, seed=seed, layers=2, sharpen=1.5), family)
        loop = RolloutLoop(
            model,
            eos_ids=frozenset(),
            tokenizer=None,
            budget_tokens=budget,
            max_running=running,
            prefix_tokens=prefix_tokens,
        )
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        loop.close()


def answers(loop, requests):
    return [[(s.resp_tokens, s.finish_reason) for s in f.result(timeout=120).sequences] for f in loop.submit(requests)]


def random_requests(rng, count):
    shared = [[rng.randrange(VOCAB) for _ in range(rng.choice([5, 20, 90]))] for _ in range(4)]
    made = []
    for index in range(count):
        prompt = [*rng.choice(shared), *[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]]
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, 90),
            temperature=rng.choice([0.7, 1.0]),
            greedy=rng.random() < 0.3,
            top_k=rng.choice([-1, -1, 5]),
        )
        made.append(Request(prompt, sampling, [index * 10 + i for i in range(rng.randint(1, 4))]))
    return made


def test_a_serving_loop_returns_freed_memory_once_it_is_idle(make_loop, monkeypatch):
    given_back, rng = threading.Event(), random.Random(1)
    monkeypatch.setattr(loop_module, "trim_freed_memory", given_back.set)
    training, serving = make_loop(), make_loop()
    serving.idle_s = 0.05
    first = answers(training, random_requests(rng, 3))
    assert not given_back.wait(0.3)
    answers(serving, random_requests(rng, 3))
    assert given_back.wait(30)
    assert answers(serving, random_requests(random.Random(1), 3)) == first  # and wakes up


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_schedule_changes_no_sample(make_loop, family, monkeypatch):
    monkeypatch.setattr(loop_module, "BUSY_PREFILL", 16)
    monkeypatch.setattr(loop_module, "IDLE_PREFILL", 48)
    rng = random.Random(7)
    requests = random_requests(rng, 30)
    calm = make_loop(family)
    expected = [answers(calm, [request])[0] for request in requests]
    busy = make_loop(family, budget=5 * 192, running=12, prefix_tokens=2000)
    futures = []
    for request in requests:
        futures += busy.submit([request])
        time.sleep(rng.choice([0.0, 0.0, 0.01]))
    got = [[(s.resp_tokens, s.finish_reason) for s in f.result(timeout=120).sequences] for f in futures]
    assert got == expected
    assert busy.scheduler.preemptions > 0
    if family == "qwen3_5":
        assert busy.counters.reused_total == 0  # a recurrent state belongs to one length only
    else:
        assert busy.counters.reused_total > 0


def test_a_long_prompt_does_not_stall_running_samples(make_loop, monkeypatch):
    monkeypatch.setattr(loop_module, "BUSY_PREFILL", 32)
    loop = make_loop()
    heard = []
    talker = Request([5], SamplingParams(max_new_tokens=400), [0], listener=lambda _, token: heard.append(token))
    first = loop.submit([talker])[0]
    while len(heard) < 5:
        time.sleep(0.001)
    before = loop.counters.decode_steps_total
    long = [random.Random(0).randrange(VOCAB) for _ in range(32 * 20)]
    late = loop.submit([Request(long, SamplingParams(max_new_tokens=1), [1])])[0]
    late.result(timeout=60)
    assert loop.counters.decode_steps_total - before >= 19  # twenty chunks, one decode step after each
    loop.cancel(first)


def test_a_conversation_reuses_its_prefix_and_generates_the_same(make_loop):
    loop, fresh = make_loop(prefix_tokens=4096), make_loop()
    context = [7, 8, 9, 10] * 12
    for turn in range(4):
        request = Request(context, SamplingParams(max_new_tokens=20), [turn])
        output, alone = answers(loop, [request])[0], answers(fresh, [request])[0]
        assert output == alone
        context = [*context, *output[0][0], 1, 2, 3]
    computed, reused = loop.counters.prefilled_total, loop.counters.reused_total
    assert computed + reused == fresh.counters.prefilled_total
    assert reused > 0.7 * fresh.counters.prefilled_total


def test_the_prefix_store_stays_within_its_budget_and_drops_the_oldest(make_loop):
    loop = make_loop(prefix_tokens=200)
    for start in range(6):
        answers(loop, [Request([start * 3 + i % 3 for i in range(64)], SamplingParams(max_new_tokens=4), [0])])
        assert loop.prefixes.tokens <= 200
    answers(loop, [Request([15 + i % 3 for i in range(64)], SamplingParams(max_new_tokens=4), [0])])
    assert loop.counters.reused_total == 48  # whole blocks of 16, and at least one token is computed
    answers(loop, [Request([i % 3 for i in range(64)], SamplingParams(max_new_tokens=4), [0])])
    assert loop.counters.reused_total == 48


def test_an_entry_stays_reachable_after_a_newer_entry_with_the_same_start_is_dropped():
    start, older, newer = list(range(16)), [1] * 16, [2] * 16
    store = PrefixStore(64)
    store.add([*start, *older], {}, version=1)
    store.add([*start, *newer], {}, version=1)
    assert store.find([*start, *older, 7], version=1) is not None  # the newer entry is now the least recently used
    store.drop_oldest()
    hit = store.find([*start, *older, 7], version=1)
    assert hit is not None
    assert hit.length == 32
    hit = store.find([*start, *newer, 7], version=1)
    assert hit is not None
    assert hit.length == 16
    store.drop_oldest()
    assert not store.covers(start, version=1)
    assert store.tokens == 0


def test_prefixes_stored_under_other_weights_are_not_found():
    store, context = PrefixStore(64), list(range(40))
    store.add(context, {}, version=1)
    hit = store.find([*context, 7], version=1)
    assert hit is not None
    assert hit.length == 32
    assert store.covers(context, version=1)
    assert store.find([*context, 7], version=2) is None
    assert not store.covers(context, version=2)


def test_after_a_weight_change_tokens_have_the_new_version_and_reuse_no_old_prefix(make_loop):
    """The tail of every sample must be what the new weights generate from the whole context, computed from scratch."""
    loop = make_loop(prefix_tokens=4096)
    loop.version = 3
    requests = [Request([5, 6, 7, i] * 8, SamplingParams(max_new_tokens=600, greedy=True), [0]) for i in range(3)]
    answers(loop, [Request(requests[0].prompt_tokens, SamplingParams(max_new_tokens=2), [0])])  # stores a prefix
    seen = threading.Event()
    count = []

    def listener(_, token):
        count.append(token)
        if len(count) == 20:
            seen.set()

    requests[0].listener = listener
    futures = loop.submit(requests)
    assert seen.wait(60)
    other = tiny_module("llama", seed=9, layers=2, sharpen=1.5)
    with loop.weights_changing(version=4), torch.no_grad():
        for (_, mine), theirs in zip(loop.model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    reused_before = loop.counters.reused_total
    for request, future in zip(requests, futures, strict=True):
        sequence = future.result(timeout=60).sequences[0]
        first_new = sequence.versions.index(4)
        assert sequence.versions == [3] * first_new + [4] * (len(sequence.versions) - first_new)
        assert 0 < first_new < 600
        context = request.prompt_tokens + sequence.resp_tokens
        with torch.no_grad():
            logits = other(torch.tensor([context])).logits[0]
        start = len(request.prompt_tokens)
        output = logits[start - 1 + first_new : -1].argmax(-1).tolist()
        assert sequence.resp_tokens[first_new:] == output
        logp = logits.log_softmax(-1)
        for i in range(first_new, len(sequence.resp_tokens)):
            assert sequence.resp_logprobs[i] == pytest.approx(
                float(logp[start - 1 + i, sequence.resp_tokens[i]]), abs=1e-5
            )
    assert loop.counters.reused_total == reused_before
    answers(loop, [Request(requests[0].prompt_tokens, SamplingParams(max_new_tokens=2), [0])])
    assert loop.counters.reused_total > reused_before  # stored under the new weights by now


def test_cancelling_one_request_frees_its_slots_and_leaves_the_others(make_loop):
    loop = make_loop()
    keep = Request([5, 6], SamplingParams(max_new_tokens=60), [1])
    alone = answers(make_loop(), [keep])[0]
    endless = [Request([7, i], SamplingParams(max_new_tokens=100_000), [0, 1]) for i in range(5)]
    futures = loop.submit([*endless[:3], keep, *endless[3:]])
    while not loop.counters.generated_total:
        time.sleep(0.001)
    for future in [*futures[:3], *futures[4:]]:
        loop.cancel(future)
        loop.cancel(future)  # a second time does nothing
    assert [(s.resp_tokens, s.finish_reason) for s in futures[3].result(timeout=60).sequences] == alone
    for future in [*futures[:3], *futures[4:]]:
        assert {s.finish_reason for s in future.result(timeout=10).sequences} == {"abort"}
    loop.wait_idle()
    load = loop.load()
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
    assert load.generated_total == loop.counters.generated_total > 60


def test_a_listener_hears_every_token_of_every_sample_with_its_alternatives(make_loop):
    loop = make_loop()
    heard = {0: [], 1: []}
    sampling = SamplingParams(max_new_tokens=12, top_logprobs=3)
    request = Request([5, 6], sampling, [3, 4], listener=lambda index, token: heard[index].append(token))
    sequences = loop.submit([request])[0].result(timeout=60).sequences
    for index, sequence in enumerate(sequences):
        assert [t.token for t in heard[index]] == sequence.resp_tokens
        assert [t.logprob for t in heard[index]] == sequence.resp_logprobs
        assert [t.top for t in heard[index]] == sequence.top_logprobs
        assert [t.finish for t in heard[index]] == [None] * 11 + ["length"]
        assert all(len(top) == 3 and top[0][1] >= top[1][1] >= top[2][1] for top in sequence.top_logprobs)


class Countdown:
    """A grammar that allows one token at a time: 9, 8, 7, then ends."""

    def __init__(self, _tokenizer):
        self.left = [9, 8, 7]

    def allowed(self):
        mask = torch.zeros(VOCAB, dtype=torch.bool).numpy()
        mask[self.left[0]] = True
        return mask

    def forces(self, token):
        return token != 8

    def push(self, token):
        assert token == self.left.pop(0)

    @property
    def finished(self):
        return not self.left


def test_each_sample_has_a_grammar_state_of_its_own(make_loop):
    request = Request([5], SamplingParams(max_new_tokens=50), [1, 2, 3], constraint=Countdown)
    beside = Request([5], SamplingParams(max_new_tokens=5), [1])
    loop = make_loop()
    constrained, free = answers(loop, [request, beside])
    assert constrained == [([9, 8, 7], "stop")] * 3
    assert free == answers(make_loop(), [beside])[0]


def test_a_listener_learns_which_tokens_a_grammar_forced(make_loop):
    heard = []
    sampling = SamplingParams(max_new_tokens=50)
    request = Request([5], sampling, [1], constraint=Countdown, listener=lambda _, token: heard.append(token))
    loop = make_loop()
    sequence = loop.submit([request])[0].result(timeout=30).sequences[0]
    assert [(token.token, token.forced) for token in heard] == [(9, True), (8, False), (7, True)]
    removed = [1 - math.exp(logprob) for logprob in sequence.resp_logprobs]
    assert [token.cut_mass for token in heard] == pytest.approx(removed, abs=1e-5)
    assert sequence.cut_mass == pytest.approx(sum(removed) / 3, abs=1e-5)


@pytest.mark.parametrize("where", ["allowed", "push", "last push"])
def test_a_failing_grammar_fails_only_its_request(make_loop, where):
    class Broken(Countdown):
        def allowed(self):
            if where == "allowed" and len(self.left) == 2:
                raise ValueError("no way on")
            return super().allowed()

        def push(self, token):
            if where.endswith("push") and len(self.left) == (1 if where == "last push" else 2):
                raise ValueError("no way on")
            super().push(token)

    loop = make_loop()
    beside = Request([5], SamplingParams(max_new_tokens=40), [1])
    limit = 3 if where == "last push" else 50  # the grammar would end after three tokens
    broken = Request([6], SamplingParams(max_new_tokens=limit), [1, 2], constraint=Broken)
    bad, good = loop.submit([broken, beside])
    with pytest.raises(EngineError, match="grammar of a request failed: ValueError: no way on"):
        bad.result(timeout=30)
    assert len(good.result(timeout=30).sequences[0].resp_tokens) == 40
    assert answers(loop, [beside]) == answers(make_loop(), [beside])
    assert loop.load().kv_tokens_used == 0


def test_a_program_that_forgets_to_close_ends_quietly(tmp_path):
    program = (
        "from tests.support.tiny import tiny_module\n"
        "from areno.engine.model.loading import prepare\n"
        "from areno.engine.rollout.loop import RolloutLoop\n"
        "from areno.types import Request, SamplingParams\n"
        "loop = RolloutLoop(prepare(tiny_module('llama', layers=2)), eos_ids=frozenset(),\n"
        "                   tokenizer=None, budget_tokens=10**6, max_running=8)\n"
        "loop.submit([Request([5], SamplingParams(max_new_tokens=100_000), [0])])\n"
        "loop.submit([Request([6], SamplingParams(max_new_tokens=3), [0])])[0].result()\n"
        "print('done')\n"
    )
    process = start_text(program, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "done\n")
