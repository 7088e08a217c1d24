"""The memory plan of experiments, compared with that of `areno train` for the same sizes, and as the command prints it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from safetensors.torch import load_file

from areno.cli.main import main
from areno.config import TrainOptions
from areno.config.experiment.machine import Machine
from areno.engine.plan.memory_plan import make_plan
from areno.experiments.plan import plan_experiment, tuned_sizes
from tests.experiments.trainer_stage import settings_of_kind

SHARED = {"rollout.scheduling_strategy": {"type": "colocation", "target": "actor", "fork": False}}
RL = {"train_dataset.max_length": 40, "gconfig.max_new_tokens": 24, "rollout.backend": "areno:d2"}
CONCURRENT = "rollout.max_concurrent_rollouts"
GIB = 2**30


@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("sft", {}, {"algo": "sft"}),
        (
            "sft",
            {
                "actor.gradient_checkpointing": True,
                "actor.optimizer.type": "adam_8bit",
                "actor.use_lora": True,
                "actor.lora_rank": 4,
                "actor.target_modules": ["q_proj"],
            },
            {
                "algo": "sft",
                "activation_checkpointing": True,
                "explicit": frozenset({"activation_checkpointing"}),  # set, not chosen for the machine
                "adam_8bit": True,
                "lora_rank": 4,
                "lora_target_modules": "q_proj",
            },
        ),
        ("sft", {"actor.backend": "fsdp:d2", "actor.fsdp.shard_weights": False}, {"algo": "sft", "world_size": 2}),
        ("rw", {"actor.mb_spec.max_tokens_per_mb": 128}, {"algo": "rm", "mini_bs": 2}),
    ],
)
def test_the_same_sizes_have_the_same_plan_in_both_front_ends(tiny_checkpoint, tmp_path, kind, changes, options):
    sizes = {"actor.mb_spec.max_tokens_per_mb": 256, "train_dataset.max_length": 64}
    plan = plan_experiment(settings_of_kind(kind, tiny_checkpoint, tmp_path, sizes | changes), GIB)
    same = {
        "ckpt": str(tiny_checkpoint),
        "device": "cpu",
        "batch_size": 4,
        "max_prompt_tokens": 1,
        "max_new_tokens": 63,
    }
    run = TrainOptions(**same | {"mini_bs": 4, "activation_checkpointing": False} | options)
    assert plan.rollout is None
    assert plan.actor == make_plan(run, GIB)


def test_rollout_in_turn_with_training_is_planned_as_by_areno_train(tiny_checkpoint, tmp_path):
    config = settings_of_kind("rl", tiny_checkpoint, tmp_path, RL | SHARED | {"rollout.backend": "areno:d1"})
    config.actor.mb_spec.max_tokens_per_mb = None
    run = TrainOptions(
        ckpt=str(tiny_checkpoint),
        device="cpu",
        algo="grpo",
        activation_checkpointing=False,
        **{"batch_size": 4, "n_samples": 2, "mini_bs": 8, "max_prompt_tokens": 40, "max_new_tokens": 24},
    )
    plan = plan_experiment(config, GIB)
    assert plan.rollout is None
    assert plan.actor == dataclasses.replace(make_plan(run, GIB), cache_wanted=plan.actor.cache_wanted)


def test_replicas_are_planned_in_addition_to_the_training_engine(tiny_checkpoint, tmp_path):
    more = {"ref": {}, "actor.kl_ctl": 0.1, "critic.optimizer": {}, "critic.mb_spec.max_tokens_per_mb": 64}
    plan = plan_experiment(settings_of_kind("rl", tiny_checkpoint, tmp_path, RL | more), GIB)
    weights = sum(t.nbytes for t in load_file(tiny_checkpoint / "model.safetensors").values())
    assert plan.rollout is not None
    assert [phase.name for phase in plan.actor.phases] == ["load", "score", "forward", "backward", "optimizer"]
    assert [phase.name for phase in plan.rollout.phases] == ["load", "rollout"]
    assert plan.transfer == weights
    assert plan.needed == plan.actor.needed + 2 * plan.rollout.peak.total + weights
    assert plan.rollout.cache_wanted == 4 * 64  # half of 4 x 2 answers for each replica
    beside = plan.actor.phase("score").parts["roles"]
    assert weights < beside < 2.1 * weights  # a reference, and a critic with a head in place of the output layer
    four = {"actor.use_lora": True, "actor.lora_rank": 2, "actor.load_in_4bit": True}
    small = plan_experiment(settings_of_kind("rl", tiny_checkpoint, tmp_path / "4", RL | more | four), GIB)
    assert small.transfer < weights / 2
    assert small.rollout.phase("load").parts["weights"] < plan.rollout.phase("load").parts["weights"]
    assert (
        small.actor.phase("score").parts["roles"] < beside - weights / 2
    )  # its reference is the actor without adapter


@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_the_size_of_a_cluster_is_not_that_of_this_machine(tiny_checkpoint, tmp_path, monkeypatch, kind):
    # Stands in for a login node with one GPU.
    monkeypatch.setattr("areno.experiments.plan.engines.this_machine", lambda: Machine(gpus=1))
    sizes = {"actor.backend": "fsdp:d4", "scheduler.type": kind, "cluster.n_gpus_per_node": 8}
    plan = plan_experiment(settings_of_kind("rl", tiny_checkpoint, tmp_path, RL | sizes), GIB)
    assert plan.rollout is not None
    assert plan.titles == ("actor, fsdp:d4", "one rollout replica, of 2 in total (rollout.backend areno:d2)")


def test_the_command_prints_each_engine_and_settings_that_would_fit(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    tree = {
        "experiment_name": "toy",
        "trial_name": "t",
        "cluster": {"fileroot": str(tmp_path)},
        "gconfig": {"n_samples": 8, "max_new_tokens": 512},
        "rollout": {"backend": "areno:d1"},
        "actor": {"path": str(tiny_checkpoint), "backend": "fsdp:d1", "optimizer": {}},
        "train_dataset": {"path": "rows.jsonl", "type": "rl", "batch_size": 16, "max_length": 512},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["plan", str(file)]) == 0
    text = capsys.readouterr().out
    titles = ("actor, fsdp:d1:", "one rollout replica, of 1 in total (rollout.backend areno:d1):")
    assert all(words in text for words in (*titles, "Fits: yes."))
    monkeypatch.setattr("areno.experiments.plan.available_bytes", lambda _: 700 * 2**20)
    assert main(["plan", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["needed"] > found["available"] == 700 * 2**20
    assert found["change"]
    assert main(["plan", str(file), *found["change"]]) == 0
    capsys.readouterr()
    assert main(["plan", str(file), "--tune-params"]) == 1
    sizes = capsys.readouterr().out.rpartition("Largest sizes that fit: ")[2].split()
    assert [name.partition("=")[0] for name in sizes] == [
        CONCURRENT,
        "actor.mb_spec.max_tokens_per_mb",
    ]
    assert main(["plan", str(file), *sizes]) == 0
    rows = int(sizes[1].partition("=")[2]) // 1024
    assert main(["plan", str(file), sizes[0], f"actor.mb_spec.max_tokens_per_mb={4096 * rows}"]) == 1
    assert main(["run", str(file), "--tune-params"]) == 2
    assert (
        f"to find a concurrency and a microbatch size that fit into memory, run `areno plan {file} --tune-params`"
        in capsys.readouterr().err
    )
    assert main(["plan", str(file), "actor.nothing=1"]) == 2


def test_no_sizes_are_proposed_if_the_cache_is_too_small_for_one_answer(tiny_checkpoint, tmp_path):
    sizes = {CONCURRENT: 8, "actor.dtype": "float32"}
    config = settings_of_kind("rl", tiny_checkpoint, tmp_path, RL | sizes)
    plan = plan_experiment(config, 8 * GIB)

    def planned(change):
        # The plan of a machine whose cache has room for all answers of one rollout, less `missing` tokens.
        assert plan.rollout is not None
        one = dataclasses.replace(plan.rollout, cache_tokens=1000 - missing, cache_wanted=1000 * change[CONCURRENT])
        return dataclasses.replace(plan, rollout=one)

    missing = 0
    assert tuned_sizes(config, plan, planned)[CONCURRENT] == 1
    missing = 1
    assert tuned_sizes(config, plan, planned) == {}
