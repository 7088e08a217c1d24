"""How a GPU's memory is divided: what training needs later is not given to the KV cache."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from areno.config.all_train_options import TrainOptions
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.loading import prepare
from areno.engine.plan import gpu_memory
from areno.engine.plan.gpu_memory import Division, Need, divide, kv_tokens
from areno.engine.plan.memory_plan import make_plan
from areno.engine.role import load_role
from areno.engine.rollout.paged.loop import PagedRolloutLoop
from areno.types import ModelRole, Request, SamplingParams
from tests.support.tiny import tiny_module

GIB = 2**30


def test_a_model_of_four_billion_parameters_still_trains_after_its_first_rollout():
    """On 80 GB: bf16 weights and fp32 masters are loaded, moments (8 bytes each) and gradients (4) come later."""
    parameters, free = 4_020_000_000, 55 * GIB
    need = Need(8 * parameters, 4 * parameters + 3 * GIB, 4 * parameters + 30 * GIB, 2 * GIB)
    found = divide(free, need, keeps_cache=True)
    assert found.recompute
    assert found.lacking == 0
    assert GIB < found.cache < free - need.moments - need.recomputed
    assert divide(free, need, keeps_cache=False).cache == pytest.approx(0.95 * free - need.moments - need.decode, abs=1)
    assert divide(40 * GIB, need, keeps_cache=True).lacking > 0, "reported before the first step, not during it"


@pytest.mark.parametrize(
    ("kept", "asked", "recompute"), [(40, None, False), (60, None, True), (60, False, False), (40, True, True)]
)
def test_layers_are_recomputed_if_their_activations_would_take_more_than_half(kept, asked, recompute):
    need = Need(recomputed=10 * GIB, kept=kept * GIB)
    found = divide(100 * GIB, need, keeps_cache=True, recompute=asked)
    assert found == Division(recompute, int(100 * GIB * 0.95) - (10 if recompute else kept) * GIB)


@pytest.fixture
def on_gpu(monkeypatch, tiny_checkpoint):
    """Makes an actor and its configuration, as on a GPU with ``free`` GiB of free memory."""

    def make(free, dtype=torch.bfloat16, **options):
        monkeypatch.setattr(gpu_memory, "available_bytes", lambda device: int(free * GIB))
        config = EngineConfig(device=torch.device("cuda"), dtype=dtype, max_running=8, **options)
        here = dataclasses.replace(config, device=torch.device("cpu")).load_options()
        return (
            config,
            str(tiny_checkpoint),
            load_role("actor", str(tiny_checkpoint), "policy", here, config.optimizer, True),
        )

    return make


def test_the_cache_takes_what_training_leaves(on_gpu, monkeypatch, caplog):
    monkeypatch.setattr(gpu_memory, "MAX_TOKENS_CUDA", 1024)
    seen = []
    monkeypatch.setattr(gpu_memory, "divide", lambda *a, **k: seen.append(a[1]) or divide(*a, **k))
    config, path, actor = on_gpu(0.5)
    parameters = sum(p.numel() for _, p in actor.model.parameters())
    assert kv_tokens(config, path, [actor], 2**16) >= 1024
    step = actor.training
    assert seen[0].moments == 8 * parameters
    assert 4 * parameters < seen[0].recomputed < seen[0].kept
    assert not step.activation_checkpointing
    config, path, _ = on_gpu(0.001)
    with caplog.at_level(logging.WARNING):
        assert kv_tokens(config, path, [actor], 64) == 1024
    assert step.activation_checkpointing
    assert "more GPU memory than is free; use --adam-8bit" in caplog.text


def test_a_cache_is_no_larger_than_all_sequences_together(on_gpu, monkeypatch):
    monkeypatch.setattr(gpu_memory, "MAX_TOKENS_CUDA", 1024)
    config, path, actor = on_gpu(64)
    context = actor.model.context_length
    assert kv_tokens(config, path, [actor], 64) == 8 * -(-context // 1024) * 1024


def test_the_plan_of_a_run_divides_a_gpu_as_the_engine_does(tiny_checkpoint):
    run = TrainOptions(algo="gspo", ckpt=str(tiny_checkpoint), device="cuda", max_prompt_tokens=64, max_new_tokens=64)
    small, large = make_plan(run, 20 * 2**20), make_plan(run, 8 * GIB)
    for plan in (small, large):
        assert plan.fits
    activations = [plan.phase("backward").parts["activations"] for plan in (small, large)]
    assert activations[0] < activations[1], "recomputed on the small GPU, kept on the large one"
    asked = dataclasses.replace(run, explicit=frozenset({"activation_checkpointing"}))
    assert make_plan(asked, 8 * GIB).phase("backward").parts["activations"] == activations[0]


def test_a_decision_to_recompute_reaches_steps_that_exist_and_roles_that_are_restored(tmp_path, tiny_checkpoint):
    engine = Engine(str(tiny_checkpoint), EngineConfig(activation_checkpointing=False))
    engine.ensure_roles({"critic": ModelRole("critic", str(tiny_checkpoint), trainable=True)})
    engine.save_model(tmp_path)
    engine.save_state(tmp_path)
    for name in ("actor", "critic"):
        assert engine.role(name).training.activation_checkpointing is False
        engine.role(name).set_recomputation(True)
        assert engine.role(name).training.activation_checkpointing is True
    before = engine.role("critic")
    engine.load_state(tmp_path)
    assert engine.role("critic") is not before
    assert engine.role("critic").training.activation_checkpointing is True
    engine.close()


@pytest.mark.parametrize(("configured", "resized"), [(0, 0), (300, 300), (None, 1024)])
def test_loading_a_role_frees_the_cache_before_its_new_size_is_measured(
    configured, resized, tiny_checkpoint, monkeypatch
):
    engine = Engine(str(tiny_checkpoint), EngineConfig(decode="eager", prefix_cache_tokens=configured))
    frozen = {"ref": ModelRole("ref", str(tiny_checkpoint), trainable=False)}
    engine.ensure_roles(frozen)
    engine.submit([Request([5, 6], SamplingParams(max_new_tokens=4), [0])])[0].result(timeout=60)
    cached, budget = engine.loop.cache.nbytes(), engine.kv_tokens
    assert cached > 0
    # Only the size of the cache depends on the device here; the second role shares the first one's model.
    monkeypatch.setattr(engine.config, "device", torch.device("cuda"))
    held = []
    monkeypatch.setattr("areno.engine.engine.kv_tokens", lambda *_: held.append(engine.loop.cache.nbytes()) or 4096)
    engine.ensure_roles(frozen)
    assert (held, engine.loop.cache.nbytes(), engine.kv_tokens) == ([], cached, budget), "nothing was loaded"
    engine.ensure_roles(frozen | {"teacher": ModelRole("teacher", str(tiny_checkpoint), trainable=False)})
    assert (held, engine.kv_tokens) == ([0], 4096)
    assert engine.loop.prefixes.budget_tokens == pytest.approx(resized, abs=1), "a default size is a quarter, rounded"
    engine.close()


def test_a_paged_loop_can_be_resized():
    model = prepare(tiny_module("llama", layers=1, hidden=32, heads=2), "llama")
    loop = PagedRolloutLoop(
        model, eos_ids=frozenset(), tokenizer=None, budget_tokens=1024, max_running=4, prefix_tokens=256
    )
    request = Request([5] * 20, SamplingParams(greedy=True, max_new_tokens=5, ignore_eos=True), [0])
    first = loop.submit([request])[0].result(timeout=60).sequences[0].resp_tokens
    loop.wait_idle()
    pages = loop.cache.allocator.pages
    loop.resize(2048, 512)
    assert (loop.scheduler.budget_tokens, loop.prefixes.budget_tokens) == (2048, 512)
    assert loop.cache.allocator.pages == 2 * (pages - 5) + 5, "a spare page, and one for each running sequence"
    assert loop.submit([request])[0].result(timeout=60).sequences[0].resp_tokens == first
    loop.close()
