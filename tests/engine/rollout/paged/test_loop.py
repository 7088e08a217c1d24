"""The paged loop, with its overlapped steps, generates the same tokens as the loop over slots."""

from __future__ import annotations

import logging
import random
import time

import pytest
import torch

from areno.engine.inference import DecodeProgress
from areno.engine.model.loading import prepare
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.paged import backends
from areno.engine.rollout.paged.backends import AttentionBackend
from areno.engine.rollout.paged.graphs import DeviceDecode
from areno.engine.rollout.paged.loop import PagedRolloutLoop
from areno.types import Request, SamplingParams
from tests.support.graphs import FakeCuda
from tests.support.tiny import tiny_module

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gpt_oss", "qwen3_5")


def model_of(family="llama", seed=0):
    return prepare(tiny_module(family, seed=seed, layers=2, hidden=32, heads=2, sharpen=1.5), family)


@pytest.fixture
def open_loop():
    loops = []

    def make(model, kind=PagedRolloutLoop, **options):
        settings = {"eos_ids": frozenset([3]), "budget_tokens": 4096, "max_running": 16, **options}
        loops.append(kind(model, tokenizer=None, **settings))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def mixed_requests(seed, plain=False):
    """Return greedy and sampled rows, groups, a prompt that is prefilled in chunks, and some rows that need the host."""
    rng = random.Random(seed)
    requests = []
    for i in range(14):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            greedy=i % 3 == 0,
            temperature=0.6 + 0.1 * (i % 5),
            max_new_tokens=rng.randint(1, 50),
            top_k=5 if i % 5 == 1 and not plain else -1,
            repetition_penalty=1.3 if i % 7 == 2 and not plain else 1.0,
            ignore_eos=i % 2 == 0,
        )
        requests.append(Request(prompt, sampling, [100 * i + k for k in range(rng.randint(1, 4))]))
    requests.append(Request([9, 11] * 350, SamplingParams(max_new_tokens=6), [1, 2]))
    return requests


def outcome(loop, requests):
    results = [future.result(timeout=120) for future in loop.submit(requests)]
    samples = [sample for result in results for sample in result.sequences]
    tokens = [(sample.resp_tokens, sample.finish_reason) for sample in samples]
    return tokens, [logprob for sample in samples for logprob in sample.resp_logprobs]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_and_slots_generate_the_same_tokens(family, open_loop):
    model, requests = model_of(family), mixed_requests(1)
    expected = outcome(open_loop(model, RolloutLoop, prefix_tokens=320), requests)
    got = outcome(open_loop(model, prefix_tokens=320), requests)
    assert got[0] == expected[0]
    assert max(abs(a - b) for a, b in zip(got[1], expected[1], strict=True)) < 1e-5


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_tight_budget_with_preemption_changes_no_token(family, plain, open_loop):
    model, requests = model_of(family), mixed_requests(2, plain)
    roomy = outcome(open_loop(model, RolloutLoop, budget_tokens=10**5, max_running=64), requests)
    tight = open_loop(model, budget_tokens=768, max_running=9, prefix_tokens=160)
    again = outcome(tight, requests)
    assert tight.scheduler.preemptions > 0
    assert again[0] == roomy[0]


def test_prefixes_that_are_kept_without_pages_of_their_own_give_way_to_running_samples(open_loop):
    """As after `Engine.enable_prefix_cache`, which may come when the pool has been allocated already."""
    model, requests = model_of(), mixed_requests(2)
    roomy = outcome(open_loop(model, RolloutLoop, budget_tokens=10**5, max_running=64), requests)
    tight = open_loop(model, budget_tokens=768, max_running=9)
    tight.prefixes.budget_tokens = 768
    assert outcome(tight, requests)[0] == roomy[0]
    assert outcome(tight, requests)[0] == roomy[0]
    assert 0 < tight.prefixes.tokens < 768


def test_every_page_is_free_when_all_samples_have_ended(open_loop):
    loop = open_loop(model_of())
    outcome(loop, mixed_requests(3))
    assert loop.cache.allocator.used == 0
    held = open_loop(model_of(), prefix_tokens=640)
    outcome(held, mixed_requests(3))
    assert 0 < held.cache.allocator.used <= held.prefixes.tokens // held.cache.page_size
    held.prefixes.clear()
    assert held.cache.allocator.used == 0


@pytest.fixture
def open_captured(open_loop, monkeypatch):
    """Opens loops whose steps are captured and replayed by fake CUDA graphs."""
    monkeypatch.setattr(
        DeviceDecode, "_backend", lambda device: AttentionBackend("test", backends.gather_attention, fixed_shape=True)
    )

    def make(model, **options):
        cuda, loop = FakeCuda(monkeypatch), open_loop(model, **options)
        loop.device_decode._captures = True
        return loop, cuda

    return make


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_plain_steps_are_all_replayed_from_graphs_that_are_captured_once(family, open_loop, open_captured, caplog):
    """The block table has its full size from the start: growing it with rows and contexts would invalidate every graph."""
    model, requests = model_of(family), mixed_requests(3, plain=True)[:6]
    expected = outcome(open_loop(model, RolloutLoop), requests)
    loop, cuda = open_captured(model, progress=DecodeProgress(1e-9))
    with caplog.at_level(logging.INFO):
        got = outcome(loop, requests)
        epoch, graphs = loop.cache.epoch, len(loop.device_decode._graphs)
        assert outcome(loop, requests)[0] == got[0] == expected[0]
    assert loop.counters.replayed_steps_total == loop.counters.decode_steps_total == cuda.replays > 50
    assert (loop.cache.epoch, list(cuda.pools.values())) == (epoch, [graphs])
    assert {"cuda_graph=True" in r.message for r in caplog.records if "decode progress" in r.message} == {True}


def test_steps_are_captured_again_after_weights_move_to_new_addresses(open_captured):
    model, requests = model_of(), mixed_requests(4, plain=True)[:4]
    loop, cuda = open_captured(model)
    first = outcome(loop, requests)[0]
    loop.wait_idle()
    loop.drop_cache()
    for parameter in model.module.parameters():
        parameter.data = parameter.data.clone()
    loop.weights_changed(1)
    assert outcome(loop, requests)[0] == first
    assert loop.counters.replayed_steps_total == loop.counters.decode_steps_total
    assert cuda.pools[0] == 0 < cuda.pools[1]


def test_a_group_prefills_its_prompt_once_and_shares_its_pages(open_loop):
    loop = open_loop(model_of())
    futures = loop.submit([Request([5] * 160, SamplingParams(max_new_tokens=40, ignore_eos=True), list(range(12)))])
    futures[0].result(timeout=60)
    assert loop.counters.prefilled_total == 160
    free = loop.cache.allocator._free
    touched = loop.cache.allocator.pages - 1 - len([page for page in free if not loop.cache.pool(0)[0][page].any()])
    assert touched <= 10 + 12 * 3, "ten pages for the prompt once, and three private ones per sample"


def test_a_prefix_is_reused_by_reference(open_loop):
    model = model_of()
    prompt = list(range(10, 60))
    sampling = SamplingParams(greedy=True, max_new_tokens=8, ignore_eos=True)
    expected = outcome(open_loop(model, RolloutLoop), [Request([*prompt, 4, 4], sampling, [0])])
    loop = open_loop(model, prefix_tokens=640)
    outcome(loop, [Request(prompt, sampling, [0])])
    assert outcome(loop, [Request([*prompt, 4, 4], sampling, [0])])[0] == expected[0]
    assert loop.counters.reused_total == 48


def test_the_surplus_token_of_an_ended_sample_is_dropped(open_loop):
    """Samples end by EOS and by length; with a step in flight, neither may leave an extra or an uncounted token."""
    model = model_of()
    eos = outcome(open_loop(model, eos_ids=frozenset()), mixed_requests(4))[0][5][0][2]
    loop = open_loop(model, eos_ids=frozenset([eos]))
    samples = outcome(loop, mixed_requests(4))[0]
    assert samples == outcome(open_loop(model, RolloutLoop, eos_ids=frozenset([eos])), mixed_requests(4))[0]
    assert any(reason == "stop" for _, reason in samples)
    assert loop.counters.generated_total == sum(len(tokens) for tokens, _ in samples)


def test_a_sample_that_ends_by_length_runs_no_surplus_step(open_loop):
    loop = open_loop(model_of())
    outcome(loop, [Request([5, 6], SamplingParams(max_new_tokens=10, ignore_eos=True), [0])])
    assert loop.cache.allocator.pages - 1 == len(loop.cache.allocator._free)
    filled = loop.cache.pool(0)[0].flatten(0, 1).any(-1).any(-1)
    assert int(filled[loop.cache.page_size :].sum()) == 2 + 9, "the last token is sampled and never fed"


def test_after_a_weight_change_tokens_have_the_new_version_and_use_no_old_page(open_loop):
    model = model_of()
    other = {name: value.clone() for name, value in model_of(seed=9).module.state_dict().items()}
    loop = open_loop(model, prefix_tokens=320)
    prompt, sampling = [5] * 40, SamplingParams(max_new_tokens=120, ignore_eos=True)
    future = loop.submit([Request(prompt, sampling, [0, 1, 2])])[0]
    wait_for_tokens(loop, future, 60)
    with loop.weights_changing(1):
        model.module.load_state_dict(other)
    samples = future.result(timeout=60).sequences
    for sample in samples:
        split = sample.versions.index(1)
        assert sample.versions == [0] * split + [1] * (120 - split)
        scores = teacher_forced(model, prompt + sample.resp_tokens)[len(prompt) + split :]
        assert torch.allclose(torch.tensor(sample.resp_logprobs[split:]), scores, atol=1e-5)


def wait_for_tokens(loop, future, count):
    """Wait until ``count`` tokens are generated, or the loop dies, which completes the future."""
    while loop.counters.generated_total < count and not future.done():
        time.sleep(0.001)


def teacher_forced(model, tokens):
    """Return the log-prob of each token given those before it, from one forward pass; entry 0 is 0."""
    from areno.engine.model.packing import PackedPlan

    ids = torch.tensor(tokens)
    plan = PackedPlan([len(ids)])
    with torch.no_grad():
        logprobs = model.logits(model.body(ids, plan.position_ids, plan)).log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs[:-1].gather(-1, ids[1:, None])[:, 0]])


def test_cancelling_with_a_step_in_flight_frees_every_page(open_loop):
    loop = open_loop(model_of(), budget_tokens=10**5)
    future = loop.submit([Request([5], SamplingParams(max_new_tokens=50_000, ignore_eos=True), [0, 1])])[0]
    wait_for_tokens(loop, future, 20)
    loop.cancel_all()
    sample = future.result(timeout=10).sequences[0]
    assert sample.finish_reason == "abort"
    assert len(sample.resp_tokens) == len(sample.resp_logprobs)
    assert loop.cache.allocator.used == 0
    assert outcome(loop, mixed_requests(5))[0]


def test_a_dropped_cache_is_allocated_again(open_loop):
    loop = open_loop(model_of(), prefix_tokens=320)
    first = outcome(loop, mixed_requests(6))
    loop.drop_cache()
    assert loop.cache.nbytes() == 0
    assert outcome(loop, mixed_requests(6)) == first


def test_make_room_allows_more_rows(open_loop):
    """24 samples at once, in a loop made for 8, all finish with the same tokens."""
    model = model_of()
    loop, request = (
        open_loop(model, max_running=8),
        Request([5, 6, 7], SamplingParams(max_new_tokens=9), list(range(24))),
    )
    few = outcome(loop, [request])
    loop.make_room(24)
    loop.scheduler.max_running = 24
    assert outcome(loop, [request])[0] == few[0]
    assert loop.device_decode.max_rows == 24
    loop.make_room(4)  # never shrinks
    assert loop.device_decode.max_rows == 24
