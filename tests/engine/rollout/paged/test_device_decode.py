"""Decode steps over static buffers: what a CUDA graph would replay, run here eagerly."""

from __future__ import annotations

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.kv_cache import Span
from areno.engine.rollout.paged.backends import Backend, gather_attention
from areno.engine.rollout.paged.cache import PagedCache
from areno.engine.rollout.paged.graphs import PAUSED, DeviceDecode, StepRow, bucket_sizes
from areno.engine.rollout.paged.plans import PagedPrefillPlan
from areno.errors import EngineError
from areno.types import SamplingParams
from tests.support.threads import torch_threads
from tests.support.tiny import tiny_module

SAMPLING = SamplingParams(temperature=0.8)
PROMPT = 20


@pytest.fixture(scope="module")
def model():
    return prepare(tiny_module("llama", layers=2, hidden=32, heads=2), "llama")


class Replay:
    """Stands in for a CUDA graph, which a CPU has none of: replaying runs what was recorded."""

    def __init__(self, program):
        self.replay = program


def device_of(model, rows=4, most=16, captures=False, monkeypatch=None):
    cache = PagedCache(100)
    cache.reserve(most, 64)
    plan = PagedPrefillPlan(cache, [Span([row], PROMPT) for row in range(rows)])
    model.body(torch.arange(rows * PROMPT) % 90, plan.position_ids, plan)
    device = DeviceDecode(model, cache, most)
    if captures:
        device._captures = True
        monkeypatch.setattr(device, "_record", lambda program: (program(), program(), Replay(program))[-1])
        monkeypatch.setattr(device, "_backend", lambda: Backend("test", gather_attention, fixed_shape=True))
    return device


def steps(device, count=30, rows=4):
    """Tokens and log-probs [count][rows], each step fed on the device by the one before it."""
    out = []
    for k in range(count):
        batch = [StepRow(PROMPT + k, 1 + k, row if k else -1, 7 + row, row, SAMPLING) for row in range(rows)]
        out.append(device.launch(batch).read())
    return out


@torch.inference_mode()
def test_tokens_fed_on_the_device_are_those_that_the_host_would_feed(model):
    ahead = steps(device_of(model))
    device, last = device_of(model), [7, 8, 9, 10]
    for k in range(30):
        batch = [StepRow(PROMPT + k, 1 + k, -1, last[row], row, SAMPLING) for row in range(4)]
        last, logprobs = device.launch(batch).read()
        assert (last, logprobs) == ahead[k]


@torch.inference_mode()
def test_rows_may_change_places_between_steps(model):
    """A compaction moves rows of the block table; the source row of a token is the one of the step before."""
    from areno.engine.rollout.scheduler import Move

    expected = steps(device_of(model), 2)
    device = device_of(model)
    steps(device, 1)
    device.cache.move([Move(3, 0, PROMPT + 1)])
    row = StepRow(PROMPT + 1, 2, 3, 0, 3, SAMPLING)
    tokens, _ = device.launch([row, PAUSED, PAUSED]).read()
    assert tokens[0] == expected[1][0][3]


@torch.inference_mode()
def test_a_paused_row_neither_writes_nor_moves_the_others(model):
    expected = steps(device_of(model), 2)
    device = device_of(model)
    steps(device, 1)
    before = device.cache.pool(0)[0].clone()
    batch = [StepRow(PROMPT + 1, 2, row, 0, row, SAMPLING) if row != 2 else PAUSED for row in range(4)]
    tokens, _ = device.launch(batch).read()
    assert [tokens[i] for i in (0, 1, 3)] == [expected[1][0][i] for i in (0, 1, 3)]
    own = device.cache.pages_of(2)
    assert torch.equal(device.cache.pool(0)[0][own], before[own])


@torch.inference_mode()
def test_a_replay_gives_what_the_eager_step_gives(model, monkeypatch):
    expected = steps(device_of(model))
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    got = steps(device)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    flat = [(a, b) for x, y in zip(got, expected, strict=True) for a, b in zip(x[1], y[1], strict=True)]
    assert max(abs(a - b) for a, b in flat) < 1e-5
    assert device.replays == 30
    assert list(device._graphs) == [4]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@torch.inference_mode()
def test_capturing_writes_no_page_and_forgets_nothing(family, monkeypatch):
    """The recording runs the program for real; in the middle of a generation that must not show, least of all in states."""
    model = prepare(tiny_module(family, layers=4, hidden=32, heads=2), family)
    expected = steps(device_of(model), 6)
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    got = steps(device, 3)
    device._graphs.clear()
    for k in range(3, 6):
        batch = [StepRow(PROMPT + k, 1 + k, row, 0, row, SAMPLING) for row in range(4)]
        got.append(device.launch(batch).read())
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    flat = [(a, b) for x, y in zip(got, expected, strict=True) for a, b in zip(x[1], y[1], strict=True)]
    assert max(abs(a - b) for a, b in flat) < 1e-5


@torch.inference_mode()
def test_graphs_are_recorded_again_when_what_they_read_has_moved(model, monkeypatch):
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    steps(device, 1)
    first = device._graphs[4]
    batch = [StepRow(PROMPT + 1, 2, 0, 0, 0, SAMPLING)] * 4
    device.launch(batch, version=1)
    assert device._graphs[4] is first, "new values in the same weights need no new graph"
    device.cache.reserve(16, 200)
    device.launch(batch, version=1)
    second = device._graphs[4]
    assert second is not first
    parameter = next(model.module.parameters())
    kept = parameter.data
    parameter.data = kept.clone()
    device.launch(batch, version=1)
    assert device._graphs[4] is second
    device.launch(batch, version=2)
    assert device._graphs[4] is not second
    parameter.data = kept


@torch.inference_mode()
def test_a_failing_capture_is_said_once_and_decoding_goes_on(model, monkeypatch, caplog):
    device = device_of(model, captures=True, monkeypatch=monkeypatch)

    def broken(program):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device, "_record", broken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with torch_threads(1):  # several share a sum out as they please
        got = steps(device, 5)
        assert got == steps(device_of(model), 5)
    assert [r.message for r in caplog.records if "not permitted when stream" in r.message] == [
        "decoding runs without CUDA graphs, because capturing failed: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize("most", [1, 3, 8, 16, 60, 64, 100, 256, 300])
def test_every_batch_has_a_bucket_that_is_not_much_larger(most):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        bucket = next(size for size in sizes if size >= rows)
        assert bucket < rows + (8 if rows <= 64 else 32)


def test_more_rows_than_there_is_room_for_are_refused(model):
    with pytest.raises(EngineError, match="a decode step of 20 rows"):
        DeviceDecode(model, PagedCache(100), 16).launch([PAUSED] * 20)
