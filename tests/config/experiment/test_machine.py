"""Defaults that depend on the machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from areno.config.experiment import SFTConfig, config_from
from areno.config.experiment.machine import Machine, devices_needed, resolve_for_machine
from areno.config.experiment.notices import notice
from areno.config.experiment.roles import takes_turns
from areno.errors import UsageError
from areno.experiments.checks import check_inputs
from areno.experiments.trainers.engines import training_layout
from tests.config.experiment.samples import SFT, accepted, refused, rl

CPU = Machine(gpus=0, cores=4)
NODE = Machine(gpus=8, cores=64, flash_attention=True)


def test_auto_settings_are_resolved_for_the_machine():
    for machine, dtype, attention, mode in (
        (CPU, "float32", "sdpa", "shm"),
        (NODE, "bfloat16", "flash_attention_2", "xccl"),
        (Machine(gpus=1), "bfloat16", "sdpa", "shm"),
    ):
        config = rl(
            ref={}, rollout__scheduling_strategy={"type": "colocation", "target": "actor"} if machine.gpus == 1 else {}
        )
        lines = resolve_for_machine(config, machine)
        assert config.ref is not None
        assert {config.actor.dtype, config.ref.dtype} == {dtype}
        assert {config.actor.attn_impl, config.ref.attn_impl} == {attention}
        assert config.actor.weight_update_mode == mode
        assert f"actor.dtype = {dtype} ({'GPU' if machine.gpus else 'CPU'})" in lines


def test_explicit_settings_are_kept():
    config = rl(actor__dtype="bfloat16", actor__attn_impl="eager", actor__weight_update_mode="disk")
    lines = resolve_for_machine(config, CPU)
    assert (config.actor.dtype, config.actor.attn_impl, config.actor.weight_update_mode) == (
        "bfloat16",
        "eager",
        "disk",
    )
    assert not any(line.startswith("actor.dtype") for line in lines)


def test_settings_are_resolved_only_once():
    config = rl()
    assert resolve_for_machine(config, CPU)
    assert resolve_for_machine(config, CPU) == []


def test_an_experiment_without_rollout_has_no_weight_transfer():
    config = config_from(SFT, SFTConfig)
    resolve_for_machine(config, NODE)
    assert config.actor.weight_update_mode == "auto"
    assert devices_needed(config) == 1


def test_ranks_must_fit_the_devices():
    sizes = {"rollout__backend": "areno:d4", "actor__backend": "fsdp:d2t2"}
    assert devices_needed(rl(**sizes)) == 8
    config = rl(**sizes)
    resolve_for_machine(config, NODE)
    assert config.cluster.n_gpus_per_node == 8
    with pytest.raises(UsageError, match=r"needs 8 devices .*, which is more than the 4 GPUs of this machine"):
        resolve_for_machine(rl(**sizes), Machine(gpus=4))
    with pytest.raises(UsageError, match=r"needs 8 devices .*, which is more than the 4 GPUs of the cluster"):
        resolve_for_machine(rl(**sizes, scheduler__type="ray"), Machine(gpus=4, nodes=2))
    with pytest.raises(UsageError, match=r"more than cluster\.n_gpus_per_node 6"):
        resolve_for_machine(rl(**sizes, cluster__n_gpus_per_node=6), NODE)
    with pytest.raises(UsageError, match=r"cluster\.n_gpus_per_node 16 is more than 8, the number of GPUs"):
        resolve_for_machine(rl(cluster__n_gpus_per_node=16), NODE)
    on_cpu = rl(**sizes)  # on a CPU, any number of processes may be requested
    resolve_for_machine(on_cpu, CPU)
    assert on_cpu.cluster.n_gpus_per_node == 8


def test_rollout_and_training_alternate_if_there_are_too_few_gpus_for_both():
    config = rl(rollout__max_head_offpolicyness=2)
    lines = resolve_for_machine(config, Machine(gpus=1))
    assert takes_turns(config)
    assert config.rollout.max_head_offpolicyness == 0
    assert lines[0] == "rollout and training alternate, because 1 GPU cannot run both at once"
    for gpus in (0, 2):
        config = rl()
        resolve_for_machine(config, Machine(gpus=gpus))
        assert not takes_turns(config)
    four = {"rollout__backend": "areno:d2t2", "actor__backend": "fsdp:d2t2"}
    config = rl(**four, cluster__n_gpus_per_node=4)
    resolve_for_machine(config, NODE)
    assert takes_turns(config)
    shared = rl(rollout__scheduling_strategy={"type": "colocation", "target": "actor"})
    resolve_for_machine(shared, Machine(gpus=1))
    assert not takes_turns(shared)  # in its own process, as requested


def test_replicas_shard_their_weights_if_possible():
    for changes, shards in (
        ({}, True),
        ({"actor__fsdp__shard_weights": False}, False),
        ({"actor__use_lora": True}, False),
        ({"actor__optimizer__type": "adam_8bit"}, False),
        ({"actor__backend": "fsdp:d2t2"}, True),
        ({"actor__backend": "fsdp:c2"}, True),
        ({"actor__backend": "fsdp:d1c2", "actor__optimizer__type": "adam_8bit"}, True),  # context parallelism needs it
        ({"actor__backend": "megatron:d1c2"}, True),
        ({"actor__backend": "megatron:d2e2"}, True),
        ({"actor__backend": "megatron:d2"}, False),
        ({"actor__backend": "fsdp:d1"}, None),
    ):
        config = rl(**{"actor__backend": "fsdp:d2", **changes})
        lines = resolve_for_machine(config, NODE)
        assert config.actor.fsdp.shard_weights is shards, changes
        assert training_layout(config.actor).fsdp is bool(shards)
        chosen = [line for line in lines if "shard_weights" in line]
        assert len(chosen) == (shards is not None and "actor__fsdp__shard_weights" not in changes)
    assert chosen == []


@pytest.mark.parametrize(
    "name",
    [
        "actor.optimizer.offload",
        "critic.optimizer.offload",
        "actor.offload_activations",
        "actor.offload",
        "enable_offload",
    ],
)
def test_settings_for_a_gpu_are_refused_on_a_machine_without_one(name):
    changes = {"critic__optimizer": {}, "actor__gradient_checkpointing": True, name.replace(".", "__"): True}
    resolve_for_machine(rl(**changes), NODE)
    with pytest.raises(UsageError, match=f"{name} true has no effect on a CPU"):
        resolve_for_machine(rl(**changes), CPU)


def test_parameters_can_only_be_offloaded_if_they_are_sharded():
    for changes in (
        {"actor__backend": "fsdp:d1", "actor__fsdp__offload_params": True},
        {"actor__backend": "fsdp:d2", "actor__fsdp__offload_params": True, "actor__optimizer__type": "adam_8bit"},
        {"actor__backend": "archon:d1", "actor__archon__offload_params": True},
    ):
        name = f"actor.{changes['actor__backend'].partition(':')[0]}.offload_params"
        with pytest.raises(UsageError, match=rf"{name} true has no effect with actor.backend .* not sharded"):
            resolve_for_machine(rl(**changes), NODE)
        assert "parameters are kept in host memory" not in notice(rl(**changes))
    for backend in ("fsdp", "archon"):
        config = rl(**{"actor__backend": f"{backend}:d2", f"actor__{backend}__offload_params": True})
        resolve_for_machine(config, NODE)
        layout = training_layout(config.actor)
        assert layout.fsdp
        assert layout.offloads


@pytest.mark.parametrize("name", ["use_torch_fsdp2", "use_custom_fsdp"])
def test_the_notice_says_whether_megatron_shards_weights(name):
    sharded, single = (rl(actor__backend=f"megatron:{d}", **{f"actor__megatron__{name}": True}) for d in ("d2", "d1"))
    assert f"actor.megatron.{name}: weights are sharded (same effect as" in notice(sharded)
    assert f"actor.megatron.{name}: the actor's weights are not sharded" in notice(single)


@pytest.mark.parametrize(
    ("setting", "value", "sharded", "whole"),
    [
        ("memory_efficient_load", True, {"actor__backend": "fsdp:d2"}, {"actor__backend": "fsdp:d1"}),
        ("memory_efficient_load", True, {"actor__backend": "fsdp:c2"}, {"actor__fsdp__shard_weights": False}),
        ("wrap_policy", {"transformer_layer_cls_to_wrap": ["Layer"]}, {"actor__backend": "fsdp:d2"}, {}),
    ],
)
def test_settings_of_sharding_are_in_the_notice_of_a_run_that_does_not_shard(setting, value, sharded, whole):
    changes = {f"actor__fsdp__{setting}": value}
    assert notice(rl(**changes, **sharded)) == ""
    line = f"  actor.fsdp.{setting}: with actor.backend fsdp:d1, the weights are not sharded in this run"
    assert line in notice(rl(**changes, **whole))


def test_the_notice_lists_a_request_not_to_shard_weights_that_are_always_sharded():
    for backend, idle in (("fsdp:d1c2", True), ("megatron:d2e2", True), ("fsdp:d2", False)):
        config = rl(actor__backend=backend, actor__fsdp__shard_weights=False)
        assert training_layout(config.actor).fsdp is idle
        assert (f"actor.fsdp.shard_weights: actor.backend {backend} has context" in notice(config)) is idle


def test_speculative_decoding_is_refused_on_a_gpu():
    resolve_for_machine(rl(rollout__speculate=3), CPU)
    with pytest.raises(UsageError, match=r"rollout\.speculate 3: speculative decoding is not supported on GPUs"):
        resolve_for_machine(rl(rollout__speculate=3), NODE)


def test_colocated_roles_share_devices_or_alternate():
    shared = {"rollout.scheduling_strategy": {"type": "colocation", "target": "actor"}}
    accepted(shared)
    turns = shared | {"rollout.scheduling_strategy.fork": False}
    accepted(turns)
    assert "have different parallel sizes; use equal sizes, or remove " in refused(turns | {"actor.backend": "fsdp:d2"})
    wrong = shared | {"rollout.scheduling_strategy.target": "critic"}
    assert "write rollout.scheduling_strategy.target=actor" in refused(wrong)
    for role in ("ref", "critic"):
        changes = {role: {"optimizer": {"lr": 1e-3}, "scheduling_strategy": {"type": "colocation", "target": "actor"}}}
        assert f"type, target of {role}.scheduling_strategy: {role} runs in the actor's" in notice(accepted(changes))
        assert f"write {role}.scheduling_strategy.target=actor" in refused(
            changes | {f"{role}.scheduling_strategy.target": "rollout"}
        )


def test_roles_that_both_share_devices_need_the_devices_of_one():
    shared = {
        f"{role}__scheduling_strategy": {"type": "colocation", "target": target}
        for role, target in {"rollout": "actor", "actor": "rollout"}.items()
    }
    config = rl(**shared, rollout__backend="areno:d4", actor__backend="fsdp:d4")
    assert devices_needed(config) == 4
    with pytest.raises(UsageError, match=r"needs 4 devices .*, which is more than the 2 GPUs"):
        resolve_for_machine(config, Machine(gpus=2))


def test_cores_are_divided_among_the_processes():
    config = rl()
    resolve_for_machine(config, CPU)
    assert config.actor.scheduling_spec[0].cpu == config.rollout.scheduling_spec[0].cpu == 2
    config = rl()
    resolve_for_machine(config, replace(CPU, threads=1))  # OMP_NUM_THREADS=1
    assert config.actor.scheduling_spec[0].cpu == 1
    explicit = rl(actor__scheduling_spec=[{"cpu": 3}])
    resolve_for_machine(explicit, CPU)
    assert explicit.actor.scheduling_spec[0].cpu == 3


def test_documented_defaults_are_resolved_like_unset_values():
    documented = {"actor__attn_impl": "flash_attention_2", "cluster__n_nodes": 32, "cluster__n_gpus_per_node": 8}
    config = rl(**documented, actor__weight_update_mode="xccl")
    lines = resolve_for_machine(config, Machine(gpus=2))
    assert (config.actor.attn_impl, config.cluster.n_nodes, config.cluster.n_gpus_per_node) == (
        "flash_attention_2",
        1,
        2,
    )
    assert config.actor.weight_update_mode == "xccl"
    assert {"cluster.n_nodes = 1 (GPU)", "cluster.n_gpus_per_node = 2 (GPU)"} <= set(lines)
    config = rl(**documented)
    assert "actor.attn_impl = sdpa (CPU)" in resolve_for_machine(config, CPU)
    shared = {"rollout__scheduling_strategy": {"type": "colocation", "target": "actor"}}
    config = rl(**shared, actor__weight_update_mode="xccl")
    assert "actor.weight_update_mode = shm (GPU)" in resolve_for_machine(config, Machine(gpus=1))


def test_zero_gpus_per_node_is_accepted_only_on_a_cpu_machine():
    config = rl(cluster__n_gpus_per_node=0)
    resolve_for_machine(config, CPU)
    assert config.cluster.n_gpus_per_node == 0
    with pytest.raises(
        UsageError, match=r"n_gpus_per_node 0 requests no GPU, but this machine has GPUs; .*CUDA_VISIBLE_DEV"
    ):
        resolve_for_machine(rl(cluster__n_gpus_per_node=0), NODE)


def test_sdpa_on_a_gpu_reports_that_it_uses_the_flash_attention_kernels():
    line = "actor.attn_impl = sdpa (on a GPU, sdpa and flash_attention_2 use the same kernels)"
    assert line in resolve_for_machine(rl(actor__attn_impl="sdpa"), NODE)
    assert line not in resolve_for_machine(rl(actor__attn_impl="sdpa"), CPU)


def test_models_and_data_must_exist(tmp_path):
    with pytest.raises(UsageError) as caught:
        check_inputs(rl(actor__path="./none", train_dataset__path="./rows.jsonl", ref__path="./none"))
    text = str(caught.value)
    assert text.count("./none") == 1
    assert "actor.path folder does not exist" in text
    assert "train_dataset.path does not exist" in text


def test_a_model_of_another_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    places = {"actor__path": str(tmp_path), "train_dataset__path": str(tmp_path / "rows.jsonl")}
    places |= {"cluster__fileroot": str(tmp_path), "reward__fn": "json.dumps"}
    check_inputs(rl(**places, actor__model_type="llama"))
    with pytest.raises(UsageError, match=r"actor.model_type is 'qwen3', but .* is a llama model"):
        check_inputs(rl(**places, actor__model_type="qwen3"))
