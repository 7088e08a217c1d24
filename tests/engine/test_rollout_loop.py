"""The rollout loop as its callers see it: stops, seeds, budgets, cancellation, failure."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.probe import validate_decoding
from areno.errors import EngineError
from areno.types import Request, SamplingParams
from tests.support.tiny import TEXTS, bpe_tokenizer, tiny_module


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(TEXTS)


@pytest.fixture
def make_loop(tokenizer):
    loops = []

    def make(family="llama", eos=frozenset(), budget=8192, running=64, seed=0):
        model = prepare(
            tiny_module(family, seed=seed, vocab=len(tokenizer), layers=2, hidden=32, heads=2, sharpen=1.5), family
        )
        loop = RolloutLoop(
            model,
            eos_ids=eos,
            tokenizer=tokenizer,
            budget_tokens=budget,
            max_running=running,
        )
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        loop.close()


def run(loop, prompt, seeds=(1,), **sampling):
    return loop.submit([Request(prompt, SamplingParams(**sampling), list(seeds))])[0].result(timeout=60).sequences


def test_a_sample_depends_on_its_seed_and_not_on_its_company(make_loop):
    loop = make_loop()
    alone = run(loop, [5, 6, 7], max_new_tokens=30, seeds=[42])[0].resp_tokens
    crowd = [
        Request([9, 8, 7, i], SamplingParams(temperature=0.5 + i / 9, max_new_tokens=10 + i), [i, i + 1])
        for i in range(9)
    ]
    request = Request([5, 6, 7], SamplingParams(max_new_tokens=30), [41, 42, 43])
    futures = loop.submit([*crowd[:5], request, *crowd[5:]])
    assert futures[5].result(timeout=60).sequences[1].resp_tokens == alone
    assert run(loop, [5, 6, 7], max_new_tokens=30, seeds=[7])[0].resp_tokens != alone


def test_preemption_changes_no_output(make_loop):
    prompts = [[3 + i, 50, 60 + i] * 5 for i in range(12)]
    requests = [Request(p, SamplingParams(max_new_tokens=90), [i, i + 100]) for i, p in enumerate(prompts)]
    roomy, tight = make_loop(), make_loop(budget=7 * 128)
    expected = [f.result(timeout=60) for f in roomy.submit(requests)]
    got = [f.result(timeout=60) for f in tight.submit(requests)]
    assert tight.scheduler.preemptions > 0
    assert roomy.scheduler.preemptions == 0
    for a, b in zip(expected, got, strict=True):
        assert [s.resp_tokens for s in a.sequences] == [s.resp_tokens for s in b.sequences]


def test_a_group_prefills_its_prompt_once(make_loop):
    loop = make_loop()
    run(loop, list(range(10, 50)), seeds=range(16), max_new_tokens=2)
    assert loop.counters.prefilled_total == 40


def test_the_cache_size_follows_actual_use_and_not_the_worst_case(make_loop):
    loop = make_loop(budget=10**6)
    run(loop, [4, 5, 6], seeds=range(8), max_new_tokens=5)
    assert loop.cache.columns < 200
    assert loop.cache.slots == 8


def test_eos_ends_a_response_and_is_its_last_token(make_loop):
    free = run(make_loop(), [5, 6, 7], max_new_tokens=40)[0].resp_tokens
    eos = free[10]
    first = free.index(eos)
    stopped = run(make_loop(eos=frozenset([eos])), [5, 6, 7], max_new_tokens=40)[0]
    assert stopped.resp_tokens == free[: first + 1]
    assert stopped.finish_reason == "stop"
    assert run(make_loop(eos=frozenset([eos])), [5, 6, 7], max_new_tokens=40, ignore_eos=True)[0].resp_tokens == free
    by_id = run(make_loop(), [5, 6, 7], max_new_tokens=40, stop_token_ids=[eos])[0]
    assert by_id.resp_tokens == stopped.resp_tokens


def test_a_stop_string_across_token_boundaries_stops_generation(make_loop, tokenizer):
    loop = make_loop()
    free = run(loop, [5, 6, 7], max_new_tokens=60, skip_special_tokens=False)[0]
    text = tokenizer.decode(free.resp_tokens)
    borders = len(tokenizer.decode(free.resp_tokens[:20]))
    stop = text[borders - 1 : borders + 2]
    assert "\ufffd" not in stop
    stopped = run(loop, [5, 6, 7], max_new_tokens=60, stop=[stop], skip_special_tokens=False)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    assert stop in tokenizer.decode(stopped.resp_tokens)
    assert stop not in tokenizer.decode(stopped.resp_tokens[:-1]), (
        "it stopped at the first token that completed the string"
    )


def test_requests_in_one_call_may_differ_in_everything(make_loop):
    loop = make_loop()
    requests = [
        Request([5], SamplingParams(greedy=True, max_new_tokens=3), [0]),
        Request([5, 6], SamplingParams(temperature=0.3, top_k=5, max_new_tokens=9), [1, 2]),
        Request([7] * 100, SamplingParams(top_p=0.5, max_new_tokens=1), [3]),
    ]
    results = [f.result(timeout=60) for f in loop.submit(requests)]
    assert [[len(s.resp_tokens) for s in r.sequences] for r in results] == [[3], [9, 9], [1]]
    assert results[1].sequences[0].cut_mass > 0


def test_consecutive_sessions_each_get_their_tokens(make_loop):
    loop = make_loop()
    for _ in range(5):
        assert len(run(loop, [5, 6], max_new_tokens=7)[0].resp_tokens) == 7
        loop.cancel_all()


def test_cancelling_returns_the_tokens_generated_so_far(make_loop):
    loop = make_loop(budget=10**6)
    future = loop.submit([Request([5], SamplingParams(max_new_tokens=100_000), [0])])[0]
    while not loop.counters.generated_total:
        pass
    loop.cancel_all()
    sequence = future.result(timeout=10).sequences[0]
    assert sequence.finish_reason == "abort"
    assert 0 < len(sequence.resp_tokens) < 100_000
    assert len(run(loop, [5], max_new_tokens=4)[0].resp_tokens) == 4


def test_a_request_that_can_never_fit_is_refused_by_name(make_loop):
    with pytest.raises(EngineError, match=r"--kv-cache-tokens"):
        make_loop(budget=100).submit([Request([1] * 50, SamplingParams(max_new_tokens=60), [0])])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("broken_prompt", [[5, 6], [6] * 12 + [5]])
def test_a_row_that_is_not_finite_fails_alone(make_loop, broken_prompt, top_p):
    """The embedding of token 5 is broken: neither neighbors nor later rows of its slot see it."""
    healthy = Request([8, 9], SamplingParams(max_new_tokens=20, logit_bias={5: -100}), [3])
    expected = make_loop().submit([healthy])[0].result(timeout=30).sequences[0].resp_tokens
    loop = make_loop()
    loop.prefixes.budget_tokens = 10_000
    with torch.no_grad():
        loop.model.module.get_input_embeddings().weight[5] = float("nan")
    broken = Request(broken_prompt, SamplingParams(max_new_tokens=20, top_p=top_p), [1, 2])
    bad, good = loop.submit([broken, healthy])
    with pytest.raises(EngineError, match="not finite"):
        bad.result(timeout=30)
    assert good.result(timeout=30).sequences[0].resp_tokens == expected
    for _ in range(2):
        assert loop.submit([healthy])[0].result(timeout=30).sequences[0].resp_tokens == expected
    assert loop.load().kv_tokens_used == 0


def test_a_loop_that_has_died_serves_again_after_a_restart(make_loop, monkeypatch):
    def refuse(_):
        raise RuntimeError("out of memory")

    loop = make_loop()
    expected = run(loop, [5, 6], max_new_tokens=5)[0].resp_tokens
    with monkeypatch.context() as patch:
        patch.setattr(loop.model, "logits", refuse)
        with pytest.raises(EngineError, match="out of memory"):
            run(loop, [5, 6], max_new_tokens=5)
    loop.cancel_all()  # must not abort requests after the restart
    loop.restart()
    assert run(loop, [5, 6], max_new_tokens=5)[0].resp_tokens == expected


def test_a_loop_that_failed_before_its_first_request_serves_after_a_restart(make_loop):
    loop = make_loop()
    with pytest.raises(RuntimeError, match="no space"), loop.weights_changing(1):
        raise RuntimeError("no space")
    assert "no space" in str(loop.restart())
    assert len(run(loop, [5, 6], max_new_tokens=5)[0].resp_tokens) == 5


def test_a_dropped_cache_leaves_nothing_behind_not_even_prefixes(make_loop):
    loop = make_loop()
    loop.prefixes.budget_tokens = 10_000
    run(loop, list(range(10, 80)), max_new_tokens=4)
    kept = [weakref.ref(t) for pair in next(iter(loop.prefixes._entries.values()))[1].values() for t in pair]
    kept += [weakref.ref(t) for t in loop.cache.keys.values()]
    assert loop.cache.nbytes() > 0
    assert loop.prefixes.tokens > 0
    loop.cancel_all()
    loop.drop_cache()
    gc.collect()
    assert loop.cache.nbytes() == loop.prefixes.tokens == 0
    assert not any(reference() is not None for reference in kept)


def test_prefixes_of_old_weights_are_freed_as_soon_as_the_weights_change(make_loop):
    loop = make_loop()
    loop.prefixes.budget_tokens = 10_000
    run(loop, list(range(10, 80)), max_new_tokens=4)
    loop.weights_changed(0)
    assert loop.prefixes.tokens > 0
    loop.weights_changed(1)
    assert (loop.prefixes.tokens, loop.version) == (0, 1)


def test_limits_change_between_two_turns_and_not_within_one(make_loop):
    """The listener is called within a turn of the loop. The first turn prefills, and decodes a second token."""
    loop, found = make_loop(), []
    loop.set_limits(prefix_tokens=10_000)
    run(loop, list(range(10, 80)), max_new_tokens=4)
    kept = loop.prefixes.tokens
    assert kept >= 64

    def lower(_sample, _token):
        loop.set_limits(prefix_tokens=0, max_running=1)
        found.append((loop.prefixes.tokens, loop.scheduler.max_running, len(loop.scheduler.running)))

    requests = [Request([5, i], SamplingParams(max_new_tokens=4), [0]) for i in range(3)]
    requests[0].listener = lower
    for future in loop.submit(requests):
        future.result(timeout=20)
    assert found == [(kept, 64, 3)] * 2 + [(0, 1, 3)] * 2
    loop.set_limits(prefix_tokens=10_000, max_running=5)
    loop.wait_idle()
    assert (loop.prefixes.budget_tokens, loop.scheduler.max_running) == (10_000, 5)


def test_the_cache_holds_no_more_than_its_budget_when_sequences_grow(make_loop):
    budget = 64 * 64
    loop = make_loop(budget=budget)
    prompts = [[3 + i] * 10 for i in range(48)]  # 48 slots of 64 columns fit, of 256 columns only 16
    futures = loop.submit([Request(p, SamplingParams(max_new_tokens=200), [i]) for i, p in enumerate(prompts)])
    assert all(len(f.result(timeout=240).sequences[0].resp_tokens) == 200 for f in futures)
    cells = loop.cache.slots * loop.cache.columns
    assert cells <= 2.1 * budget, "a quarter of headroom in the columns, and slots in multiples of eight"


def test_tokens_carry_the_version_of_the_weights(make_loop):
    loop = make_loop()
    loop.version = 7
    assert run(loop, [5], max_new_tokens=3)[0].versions == [7, 7, 7]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_the_bytes_per_cached_token_are_measured(family):
    module = tiny_module(family)
    size = validate_decoding(prepare(module, family), family)
    if family == "llama":
        assert size.bytes_per_token == 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, fp32
    else:
        assert size.bytes_per_token > 0
    assert len(size.layers) == (0 if family == "qwen3_5" else 4)  # a recurrent model keeps more than keys and values


def test_an_error_anywhere_in_the_loop_fails_every_request(make_loop, monkeypatch):
    loop = make_loop()

    def broken(moves):
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(loop.cache, "move", broken)
    requests = [Request([5, i], SamplingParams(max_new_tokens=3 + i), [0]) for i in range(6)]
    for future in loop.submit(requests):
        with pytest.raises(EngineError, match="no memory for the copy"):
            future.result(timeout=20)


def test_cancelling_the_future_of_a_request_has_no_effect(make_loop):
    loop = make_loop()
    future = loop.submit([Request([5], SamplingParams(max_new_tokens=30), [0])])[0]
    assert not future.cancel()
    assert len(future.result(timeout=20).sequences[0].resp_tokens) == 30
