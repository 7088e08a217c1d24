"""Prompt lookup: the same answers in fewer calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.loading import prepare
from areno.engine.rollout.drafts import MATCH, DraftIndex
from areno.engine.rollout.loop import RolloutLoop
from areno.errors import UsageError
from areno.types import Request, SamplingParams
from tests.support.examples import examples
from tests.support.tiny import save_tiny_checkpoint, tiny_module


@pytest.fixture
def make_loop():
    loops = []

    def make(model, speculate, eos=frozenset(), budget=8192):
        loop = RolloutLoop(
            model, eos_ids=eos, tokenizer=None, budget_tokens=budget, max_running=16, speculate=speculate
        )
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        loop.close()


def looked_up(tokens, most):
    """Return the draft by definition, searching everywhere."""
    tail = tokens[-MATCH:]
    for start in range(len(tokens) - MATCH - 1, -1, -1):
        if len(tail) == MATCH and tokens[start : start + MATCH] == tail:
            return tokens[start + MATCH : start + MATCH + most]
    return []


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 60), max_size=6), st.integers(1, 6))
def test_a_draft_is_what_followed_the_last_match(tokens, calls, most):
    index = DraftIndex()
    for length in sorted(min(call, len(tokens)) for call in calls):
        assert index.propose(tokens[:length], most) == looked_up(tokens[:length], most)


def requests(**more):
    period = [5, 9, 13, 17, 21]
    kinds = [{"greedy": True}, {"temperature": 0.3}, {}, {"top_k": 3, "temperature": 0.5}, {"top_logprobs": 2}]
    kinds.append({"repetition_penalty": 1.2})
    return [
        Request(period * (2 + i), SamplingParams(max_new_tokens=40 + i, **kind, **more), [i, i + 9])
        for i, kind in enumerate(kinds)
    ]


def answers(loop, asked):
    return [s for f in loop.submit(asked) for s in f.result(timeout=120).sequences]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_answers_do_not_change(make_loop, family):
    model = prepare(tiny_module(family, sharpen=4.0), family)
    plain, quick = make_loop(model, 0), make_loop(model, 6)
    expected, got = answers(plain, requests()), answers(quick, requests())
    assert [s.resp_tokens for s in got] == [s.resp_tokens for s in expected]
    for a, b in zip(got, expected, strict=True):
        assert a.resp_logprobs == pytest.approx(b.resp_logprobs, abs=1e-5)
        assert a.finish_reason == b.finish_reason
        assert [[t for t, _ in top] for top in a.top_logprobs] == [[t for t, _ in top] for top in b.top_logprobs]
    assert quick.counters.drafted_total > 0


def test_a_text_that_repeats_itself_takes_fewer_steps(make_loop):
    model = prepare(tiny_module("llama", sharpen=4.0), "llama")
    asked = [Request([5, 9, 13] * 4, SamplingParams(max_new_tokens=120, greedy=True), [1])]
    plain, quick = make_loop(model, 0), make_loop(model, 7)
    expected = answers(plain, asked)[0].resp_tokens
    cycle = next(p for p in range(1, 60) if expected[-p:] == expected[-2 * p : -p])  # greedy decoding ends in a loop
    assert cycle < 40
    assert answers(quick, asked)[0].resp_tokens == expected
    assert quick.counters.agreed_total > 20
    assert quick.counters.decode_steps_total == plain.counters.decode_steps_total - quick.counters.agreed_total


def test_a_stop_token_inside_a_draft_ends_the_answer_there(make_loop):
    model = prepare(tiny_module("llama", sharpen=4.0), "llama")
    whole = answers(make_loop(model, 0), requests())
    eos = frozenset({whole[0].resp_tokens[25], whole[2].resp_tokens[11]})
    expected = answers(make_loop(model, 0, eos), requests())
    got = answers(make_loop(model, 6, eos), requests())
    assert [(s.resp_tokens, s.finish_reason) for s in got] == [(s.resp_tokens, s.finish_reason) for s in expected]
    assert any(s.finish_reason == "stop" for s in got)


def test_a_tight_budget_changes_nothing(make_loop):
    model = prepare(tiny_module("llama", sharpen=4.0), "llama")
    expected = answers(make_loop(model, 0), requests())
    tight = make_loop(model, 6, budget=4 * 128)
    assert [s.resp_tokens for s in answers(tight, requests())] == [s.resp_tokens for s in expected]
    assert tight.scheduler.preemptions > 0


def test_a_recurrent_model_is_refused(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "hybrid", "qwen3_5")
    with pytest.raises(UsageError, match=r"--speculate 4: .* cannot be rolled back"):
        Engine(str(folder), EngineConfig(trains="nothing", speculate=4))


def test_accepted_draft_tokens_stay_cached_when_a_sample_changes_slots(make_loop):
    """The first token of a call may end one sample; another, which gets its slot, has more tokens from that call."""
    period = [5, 9, 13, 17, 21]
    asked = [Request(period * 2, SamplingParams(max_new_tokens=20 + 30 * i), [i, i + 7]) for i in range(3)]
    asked.append(Request(period * 10, SamplingParams(greedy=True, max_new_tokens=150), [0]))
    results = []
    for speculate in (0, 4):
        loop = make_loop(prepare(tiny_module("qwen3_moe", layers=2, sharpen=1.5), "qwen3_moe"), speculate)
        results.append([s for f in loop.submit(asked) for s in f.result(60).sequences])
    assert loop.counters.agreed_total
    for plain, speculative in zip(*results, strict=True):
        assert speculative.resp_tokens == plain.resp_tokens
        assert speculative.resp_logprobs == pytest.approx(plain.resp_logprobs, abs=1e-5)
