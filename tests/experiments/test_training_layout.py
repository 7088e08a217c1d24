"""How a backend and the settings of its section map to a layout of ranks, without a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areno.config.experiment import GRPOConfig, config_from
from areno.config.experiment.notices import notice
from areno.engine.parallel.layout import Layout
from areno.engine.train.loss_scale import LossScale
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import UsageError
from areno.experiments.trainers.engines import engine_config, optimizer_of, training_layout
from tests.config.experiment.samples import SAMPLES, accepted, changed, refused
from tests.support.tiny import save_tiny_checkpoint

LAYERS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "deep", "llama", layers=LAYERS))


def experiment(model: str, backend: str, changes: dict[str, Any]) -> GRPOConfig:
    tree = changed(SAMPLES[GRPOConfig], {"actor.path": model, "actor.backend": backend} | changes)
    return config_from(tree, GRPOConfig)


@pytest.fixture
def actor(model):
    def of(backend: str, **settings: Any):
        changes = {f"actor.{name.replace('__', '.')}": value for name, value in settings.items()}
        return experiment(model, backend, changes).actor

    return of


@pytest.mark.parametrize(
    ("backend", "settings", "layout"),
    [
        ("fsdp:d2t2", {}, Layout(2, 2)),
        ("fsdp:d2c2", {}, Layout(2, cp_size=2)),
        ("archon:d4e2", {}, Layout(4, ep_size=2)),
        ("archon:d2t2p2c2e4", {"archon__pp_schedule": "1F1B"}, Layout(2, 2, cp_size=2, ep_size=4, pp_size=2)),
        ("archon:p2", {}, Layout(pp_size=2, pp_chunks=2)),
        ("archon:p8", {}, Layout(pp_size=8)),  # too few layers for two chunks per stage
        ("archon:p2", {"archon__pp_layers_per_stage": 7}, Layout(pp_size=2)),
        ("archon:p2", {"archon__reshard_after_forward_policy": "always"}, Layout(pp_size=2, pp_chunks=2)),
        ("archon:d2", {"archon__reshard_after_forward_policy": "never"}, Layout(2, reshards=False)),
        ("megatron:d2p2", {}, Layout(2, pp_size=2)),
        ("megatron:p2", {"megatron__virtual_pipeline_parallel_size": 3}, Layout(pp_size=2, pp_chunks=3)),
        ("megatron:(attn:d4t2|ffn:d2e4)", {}, Layout(4, 2, ep_size=2)),
        ("megatron:(attn:d4|ffn:d2t2)", {}, Layout(4, ep_size=2)),
    ],
)
def test_a_backend_maps_to_a_layout(actor, backend, settings, layout):
    found = training_layout(actor(backend, **settings))
    staged, always = layout.pp_size > 1, settings.get("archon__reshard_after_forward_policy") == "always"
    assert found == Layout(
        layout.dp_size,
        layout.tp_size,
        layout.fsdp,
        layout.cp_size,
        layout.ep_size,
        layout.pp_size,
        layout.pp_chunks,
        (1, 1) if staged and backend.startswith("archon") else (0, 0),
        always or (layout.reshards and not (staged and backend.startswith("archon"))),
    )


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        (Layout(pp_size=2), [6, 6]),
        (Layout(pp_size=2, pp_less=(1, 1)), [6, 6]),
        (Layout(pp_size=3, pp_less=(1, 1)), [4, 5, 3]),
        (Layout(pp_size=2, pp_chunks=2, pp_less=(1, 1)), [3, 4, 3, 2]),
        (Layout(pp_size=4, pp_less=(3, 2)), [2, 4, 4, 2]),
        (Layout(pp_size=5), [3, 3, 2, 2, 2]),
        (Layout(pp_size=4, pp_chunks=3, pp_less=(4, 4)), [1] * 12),
    ],
)
def test_layers_are_divided_by_the_work_of_each_chunk(layout, runs):
    found = layout.runs_of_layers(LAYERS)
    assert [len(run) for run in found] == runs
    assert [layer for run in found for layer in run] == list(range(LAYERS))


@pytest.mark.parametrize(
    ("backend", "settings", "words"),
    [
        (
            "archon:p2",
            {"archon__pp_layers_per_stage": 5},
            "divides the 12 layers of .* into 3 chunks, but 3 chunks cannot be divided equally among the 2 pipeline stages",
        ),
        (
            "megatron:p4",
            {"megatron__virtual_pipeline_parallel_size": 4},
            "12 layers of .* too few for 4 stages of 4 chunks",
        ),
        ("megatron:p16", {}, "too few for 16 stages of 1 chunks"),
    ],
)
def test_layers_that_do_not_divide_are_refused(actor, backend, settings, words):
    with pytest.raises(UsageError, match=words):
        training_layout(actor(backend, **settings))


def test_weights_are_sharded_if_the_backend_shards_them(actor):
    assert training_layout(actor("megatron:d2", fsdp__shard_weights=True)).fsdp
    section = actor("megatron:d2", megatron__use_torch_fsdp2=True).megatron
    assert section.shards_weights
    assert not actor("megatron:d2").megatron.shards_weights


@pytest.mark.parametrize("backend", ["archon", "megatron"])
def test_deterministic_algorithms_are_enabled(actor, backend):
    wanted = {f"{backend}__use_deterministic_algorithms": True, "dtype": "float32"}
    assert engine_config(actor(f"{backend}:d1", **wanted)).deterministic
    assert not engine_config(actor("fsdp:d1", **wanted)).deterministic


def test_number_formats_of_states_and_gradients_reach_the_optimizer(actor):
    def made(**settings: Any) -> OptimizerOptions:
        return engine_config(actor("fsdp:d2", dtype="float32", **settings)).optimizer

    assert (made().moments, made().reduce_bf16) == ("fp32", False)
    assert made(optimizer_dtype="bfloat16").moments == made(optimizer__type="adam_bf16").moments == "bf16"
    assert made(optimizer_dtype="bfloat16", optimizer__type="adam_8bit").moments == "8bit"
    assert made(grad_reduce_dtype="bfloat16").reduce_bf16


@pytest.mark.parametrize(
    ("setting", "value", "attribute"),
    [
        ("optimizer_dtype", "bfloat16", "adam_bf16"),
        ("grad_reduce_dtype", "bfloat16", "reduce_bf16"),
        ("offload", True, "offload"),
        ("fsdp.per_layer_optim_step", True, "offload"),
    ],
)
def test_actor_and_critic_choose_the_settings_of_their_own_optimizers(setting, value, attribute):
    for chooses, other in (("actor", "critic"), ("critic", "actor")):
        config = accepted({"critic.optimizer": {}, f"{chooses}.{setting}": value})
        assert getattr(optimizer_of(getattr(config, chooses)), attribute) is True
        assert getattr(optimizer_of(getattr(config, other)), attribute) is False
    assert "has no effect: ref runs in the actor's engine" in refused({f"ref.{setting}": value})


def test_the_loss_scale_reaches_the_optimizer(actor, model):
    settings = {"optimizer__initial_loss_scale": 1024.0, "optimizer__min_loss_scale": 2.0}
    settings |= {"optimizer__loss_scale_window": 7.0, "optimizer__hysteresis": 3}
    assert engine_config(actor("fsdp:d1", dtype="float16", **settings)).optimizer.loss_scale == LossScale(1024, 2, 7, 3)
    assert engine_config(actor("fsdp:d1", dtype="float32", **settings)).optimizer.loss_scale is None
    text = notice(experiment(model, "fsdp:d1", {"actor.optimizer.hysteresis": 3}))
    assert "actor.optimizer.hysteresis: only read with dtype float16" in text


def test_sharding_settings_reach_the_layout(actor):
    plain = training_layout(actor("fsdp:d2"))
    names = ["LlamaAttention", "LlamaMLP"]
    for settings, expected in (
        ({"fsdp__offload_params": True}, replace(plain, offloads=True)),
        ({"fsdp__memory_efficient_load": True}, replace(plain, reads_once=True)),
        ({"fsdp__wrap_policy__transformer_layer_cls_to_wrap": names}, replace(plain, units=tuple(names))),
    ):
        assert training_layout(actor("fsdp:d2", **settings)) == expected
    # Each tensor-parallel rank reads its own shards.
    assert not training_layout(actor("fsdp:d2t2", fsdp__memory_efficient_load=True)).reads_once
    assert training_layout(actor("archon:d2", archon__offload_params=True)).offloads
    assert not training_layout(actor("fsdp:d2", archon__offload_params=True)).offloads
    for setting in ("fsdp__per_layer_optim_step", "offload"):
        assert engine_config(actor("fsdp:d2", dtype="float32", **{setting: True})).optimizer.offload
    assert training_layout(actor("fsdp:d2", offload=True)).offloads


def test_kernels_of_the_hub_need_their_package(actor, monkeypatch):
    monkeypatch.setattr("areno.config.packages.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"use_kernels needs the packages kernels; install them: .*"):
        actor("fsdp:d1", use_kernels=True)
    monkeypatch.setattr("areno.config.packages.importlib.util.find_spec", lambda name: name)
    assert engine_config(actor("fsdp:d1", use_kernels=True, dtype="float32")).load_options().use_kernels


def test_the_notice_says_which_settings_have_an_effect(model):
    changes = {"actor.megatron.virtual_pipeline_parallel_size": 2, "actor.archon.ac_mode": "full"}
    text = notice(experiment(model, "megatron:d2p2", changes | {"actor.megatron.async_save": True}))
    assert "actor.megatron.async_save: areno's own engine replaces this backend" in text
    assert "actor.archon: section of an unused backend" in text
    assert "actor.megatron.virtual_pipeline_parallel_size: each stage has 2 model chunks" in text
    text = notice(experiment(model, "archon:p2", {"actor.archon.pp_schedule": "ZBVZeroBubble"}))
    assert "actor.archon.pp_schedule: areno uses Interleaved1F1B instead" in text
