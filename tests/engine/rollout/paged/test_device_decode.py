"""Decode steps over static buffers: what a CUDA graph would replay, run here eagerly."""

from __future__ import annotations

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.paged import plans
from areno.engine.rollout.paged.backends import AttentionBackend, gather_attention
from areno.engine.rollout.paged.capture import why_not_captured
from areno.engine.rollout.paged.graphs import PAUSED, DeviceDecode, StepRow, bucket_sizes
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.paged.plans import PagedPrefillPlan
from areno.engine.rollout.slot_cache import PrefillSpan
from areno.errors import EngineError
from areno.types import SamplingParams
from tests.support.graphs import FakeCuda
from tests.support.threads import torch_threads
from tests.support.tiny import tiny_module

SAMPLING = SamplingParams(temperature=0.8)
PROMPT = 20


@pytest.fixture(scope="module")
def model():
    return prepare(tiny_module("llama", layers=2, hidden=32, heads=2), "llama")


def device_of(model, rows=4, most=16, captures=False, monkeypatch=None):
    """Return a decoder with prefilled rows; with ``captures``, a fake CUDA records its graphs."""
    cache = PagedCache(100)
    cache.reserve(most, 64)
    plan = PagedPrefillPlan(cache, [PrefillSpan([row], PROMPT) for row in range(rows)])
    model.body(torch.arange(rows * PROMPT) % 90, plan.position_ids, plan)
    device = DeviceDecode(model, cache, most)
    if captures:
        device._captures = True
        device.cuda = FakeCuda(monkeypatch)
        monkeypatch.setattr(device, "_backend", lambda: AttentionBackend("test", gather_attention, fixed_shape=True))
    return device


def steps(device, count=30, rows=4):
    """Return tokens and log-probs [count][rows]; each step is fed on the device by the previous one."""
    out = []
    for k in range(count):
        batch = [StepRow(PROMPT + k, 1 + k, row if k else -1, 7 + row, row, SAMPLING) for row in range(rows)]
        out.append(device.launch(batch).read())
    return out


@torch.inference_mode()
def test_tokens_fed_on_the_device_equal_those_fed_by_the_host(model):
    ahead = steps(device_of(model))
    device, last = device_of(model), [7, 8, 9, 10]
    for k in range(30):
        batch = [StepRow(PROMPT + k, 1 + k, -1, last[row], row, SAMPLING) for row in range(4)]
        last, logprobs = device.launch(batch).read()
        assert (last, logprobs) == ahead[k]


@torch.inference_mode()
def test_rows_may_change_places_between_steps(model):
    """A compaction moves rows of the block table; a token's source row is its row in the previous step."""
    from areno.engine.rollout.scheduler import Move

    expected = steps(device_of(model), 2)
    device = device_of(model)
    steps(device, 1)
    device.cache.move([Move(3, 0, PROMPT + 1)])
    row = StepRow(PROMPT + 1, 2, 3, 0, 3, SAMPLING)
    tokens, _ = device.launch([row, PAUSED, PAUSED]).read()
    assert tokens[0] == expected[1][0][3]


@torch.inference_mode()
def test_a_paused_row_neither_writes_nor_changes_the_others(model):
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
    assert device.replays == device.cuda.replays == 30
    assert [size for size in bucket_sizes(16) if size in device._graphs] == [4, 16]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@torch.inference_mode()
def test_capturing_writes_no_page_and_loses_no_state(family, monkeypatch):
    """Capturing really runs the program; in mid-generation that must have no effect, least of all on recurrent states."""
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
def test_graphs_are_captured_again_when_the_memory_they_read_has_moved(model, monkeypatch):
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
def test_graphs_are_captured_again_after_they_were_dropped(model, monkeypatch):
    """They get a new pool: older PyTorch aborts a capture into a pool whose graphs are gone."""
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    expected = steps(device, 3)
    device.release()
    assert not any(device.cuda.pools.values()), "a graph is still alive"
    assert steps(device, 3) == expected
    assert device.replays == 6
    assert device._captures
    assert list(device.cuda.pools.values()) == [0, 2], "two graphs share the second pool"


@torch.inference_mode()
def test_the_largest_graph_is_captured_first_and_all_on_one_stream(model, monkeypatch):
    """Later captures then fit into the pool's memory; each additional stream would keep a cuBLAS workspace."""
    device = device_of(model, rows=8, captures=True, monkeypatch=monkeypatch)
    sizes, capture = [], device._graphs.capture
    monkeypatch.setattr(device._graphs, "capture", lambda size, program: (sizes.append(size), capture(size, program)))
    for rows in (2, 8, 3):
        steps(device, 2, rows)
    assert sizes == [16, 2, 8, 4]
    assert FakeCuda.streams == 1


def host_read(*arguments):
    """Attention that reads a value on the host, as a fallback without a kernel may."""
    assert arguments[5].max().item() < 1000
    return gather_attention(*arguments)


class CompilationError(Exception):
    """Like Triton's, not a RuntimeError."""


@pytest.mark.parametrize(
    ("fail", "attention", "reason"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nmore"),
            gather_attention,
            "not permitted when",
        ),
        (CompilationError("out of resource: shared memory"), gather_attention, "out of resource"),
        (None, host_read, "called a synchronizing CUDA operation"),
    ],
)
@torch.inference_mode()
def test_a_failing_capture_is_logged_once_and_decoding_continues(fail, attention, reason, model, monkeypatch, caplog):
    """Decoding continues on the main stream: elsewhere it would not wait for the weights of the next update."""
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    device.cuda.fail = fail
    monkeypatch.setattr(plans, "paged_attention", attention)
    with torch_threads(1):  # several threads may divide a sum differently each time
        got = steps(device, 5)
        assert got == steps(device_of(model), 5)
    assert device.cuda.current is device.cuda.main
    assert device.cuda.mode == "default"
    assert device.replays == len(device._graphs) == 0
    messages = [r.message for r in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("decoding runs without CUDA graphs, because capturing failed: ")
    assert reason in messages[0]
    assert "\n" not in messages[0]


@torch.inference_mode()
def test_an_engine_error_is_not_mistaken_for_a_failing_capture(model, monkeypatch):
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    device.cuda.fail = EngineError("a table is too narrow")
    with pytest.raises(EngineError, match=r"^a table is too narrow"):
        steps(device, 2)
    assert device.cuda.current is device.cuda.main


def test_an_moe_model_is_captured_only_in_bf16(monkeypatch, caplog):
    model = prepare(tiny_module("qwen3_moe", layers=2, hidden=32, heads=2), "moe")
    device = device_of(model, captures=True, monkeypatch=monkeypatch)
    with torch.inference_mode():
        steps(device, 2)
    assert device.replays == 0
    assert [r.message for r in caplog.records] == [
        "decoding runs without CUDA graphs, because PyTorch's grouped matmul for mixture-of-experts models synchronizes "
        "with the host if the dtype is float32; use --dtype bfloat16"
    ]
    assert why_not_captured(model.config, torch.bfloat16) is None
    assert why_not_captured(tiny_module("llama").config, torch.float32) is None


@pytest.mark.parametrize("most", [1, 3, 8, 16, 60, 64, 100, 256, 300])
def test_every_batch_has_a_bucket_that_is_not_much_larger(most):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        bucket = next(size for size in sizes if size >= rows)
        assert bucket < rows + (8 if rows <= 64 else 32)


def test_more_rows_than_the_maximum_are_refused(model):
    with pytest.raises(EngineError, match="a decode step has 20 rows"):
        DeviceDecode(model, PagedCache(100), 16).launch([PAUSED] * 20)
