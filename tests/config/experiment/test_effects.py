"""Every field of every section: a value other than the default is kept, or refused with the declared reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from areno.config.experiment import (
    DPOConfig,
    GRPOConfig,
    RWConfig,
    SFTConfig,
    config_from,
)
from areno.config.experiment.backend_sections import UNUSED_BACKEND
from areno.config.experiment.notices import notice
from areno.config.experiment.saving import config_text
from areno.config.experiment.setting_declaration import paths_of, settings_of, walk
from areno.config.secrets import SECRETS
from areno.errors import UsageError
from tests.config.experiment.samples import SAMPLES, changed
from tests.config.experiment.shown_by import EFFECTS

REPO = Path(__file__).parents[3]
CLASSES = [GRPOConfig, DPOConfig, RWConfig, SFTConfig]
# Other settings that a setting requires, by its path or the beginning of its path.
COMPANIONS: dict[str, dict] = {
    "valid_dataset": {"valid_dataset.path": "x", "valid_dataset.type": "rl", "evaluator.freq_steps": 1},
    "teacher": {"teacher.path": "x", "teacher.rollout": {}},
    "teacher.engine_type": {"teacher.train": {}, "teacher.rollout": None},
    "teacher.train": {"teacher.engine_type": "train", "teacher.rollout": None},
    "critic": {"critic.optimizer": {}},
    "critic.mask_no_eos_with_zero": {"actor.mask_no_eos_with_zero": True},
    "eval_gconfig": {"valid_dataset": {"path": "x", "type": "rl"}, "evaluator.freq_steps": 1},
    "evaluator.freq_epochs": {"valid_dataset": {"path": "x", "type": "rl"}},
    "evaluator.freq_steps": {"valid_dataset": {"path": "x", "type": "rl"}},
    "evaluator.freq_secs": {"valid_dataset": {"path": "x", "type": "rl"}},
    "evaluator.eval_before_train": {"valid_dataset": {"path": "x", "type": "rl"}},
    "evaluator.keep_best": {"valid_dataset": {"path": "x", "type": "rl"}, "evaluator.freq_steps": 1},
    "evaluator.early_stop_patience": {"valid_dataset": {"path": "x", "type": "rl"}, "evaluator.freq_steps": 1},
    "actor.sapo_tau_pos": {"actor.use_sapo_loss": True},
    "actor.sapo_tau_neg": {"actor.use_sapo_loss": True},
    "actor.rejection_sampling": {"actor.use_decoupled_loss": True},
    "actor.rejection_sampling.agg": {"actor.rejection_sampling.level": "sequence"},
    "actor.prox_logp_method": {"actor.use_decoupled_loss": True},
    "actor.m2_threshold": {"actor.use_decoupled_loss": True},
    "actor.overlong_reward_penalty": {"actor.overlong_tokens": 4, "actor.overlong_penalty_factor": 1.0},
    "actor.overlong_tokens": {"actor.overlong_reward_penalty": True, "actor.overlong_penalty_factor": 1.0},
    "actor.overlong_penalty_factor": {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 4},
    "actor.algorithm_options": {"actor.algorithm": "gmpo"},
    "actor.kl_ctl": {"ref": {}},
    "actor.kl_estimator": {"ref": {}},
    "actor.kl_loss_coef": {"ref": {}},
    "actor.kl_loss_type": {"ref": {}, "actor.kl_loss_coef": 0.1},
    "actor.log_agent_stats_keys": {"actor.log_agent_stats": True},
    "actor.lora_rank": {"actor.use_lora": True},
    "actor.lora_alpha": {"actor.use_lora": True},
    "actor.load_in_4bit": {"actor.use_lora": True},
    "actor.offload_activations": {"actor.gradient_checkpointing": True},
    "actor.fsdp.shard_weights": {"actor.backend": "fsdp:d2"},
    "actor.target_modules": {"actor.use_lora": True},
    "actor.optimizer.min_lr_ratio": {"actor.optimizer.lr_scheduler_type": "linear"},
    "actor.mb_spec.n_mbs": {"actor.mb_spec.max_tokens_per_mb": 64},
    "actor.scheduling_strategy.type": {"actor.scheduling_strategy.target": "rollout"},
    "actor.scheduling_strategy.target": {"actor.scheduling_strategy.type": "colocation"},
    "actor.scheduling_strategy.fork": {"actor.scheduling_strategy": {"type": "colocation", "target": "rollout"}},
    "train_dataset.split": {"train_dataset.dataset_kwargs": {"loader": "a.py:load"}},
    "gconfig.lora_name": {"actor.use_lora": True},
    "gconfig.greedy": {"gconfig.n_samples": 1},
    "rollout.api_url": {"rollout.backend": "vllm:d1"},
    "rollout.provider_api_key": {"rollout.backend": "vllm:d1"},
    "rollout.on_stale": {"rollout.max_staleness": 2},
    "rollout.agent.subproc_max_workers": {"rollout.agent.mode": "subproc"},
    "rollout.agent.agent_cls_path": {"workflow.path": "agent"},
    "cluster.n_nodes": {"scheduler.type": "slurm", "cluster.n_gpus_per_node": 0},
}
VALUES = {
    "rollout.api_url": "http://host:8000",
    "reward.weights": {"some": 0.5},
    "experiment_name": "other",
    "trial_name": "other",
    "allocation_mode": "areno:d1+fsdp:d1",
    "train_dataset.type": "sft",
    "valid_dataset": {"path": "x", "type": "rl"},
    "teacher": {"path": "x", "rollout": {}},
    "critic": {"optimizer": {}},
    "actor.backend": "fsdp:d2",
    "rollout.backend": "areno:d2",
    "actor.attn_impl": "eager",
    "actor.algorithm": "gmpo",
    "actor.algorithm_options": {"gmpo_clip_eps": 0.3},
    "actor.model_type": "qwen3",
    "actor.weight_update_mode": "disk",
    "actor.adv_norm.std_level": "group",
    "actor.adv_norm.group_size": 2,
    "rollout.agent.mode": "subproc",
    "scheduler.type": "local",
    "actor.scheduling_strategy.target": "rollout",
    "async_training": False,
    "cluster.name_resolve.type": "memory",
    "actor.rejection_sampling.action": "clamp",
    "rollout.save_rollouts": "all",
}
# Settings that must agree with another setting, with a part of the error message.
MUST_AGREE = {
    "rollout.consumer_batch_size": "differs from train_dataset.batch_size",
    "actor.temperature": "differs from gconfig.temperature",
    "actor.max_new_tokens": "differs from gconfig.max_new_tokens",
    "rollout.use_lora": "differs from actor.use_lora",
    "rollout.lora_name": "differs from gconfig.lora_name",
    "tokenizer_path": "differs from actor.path",
    "rollout.tokenizer_path": "differs from actor.path",
    "actor.is_critic": "is_critic",
    "train_dataset.type": "is for",
}


def one_path_per_field():
    """The shortest path of each declared field, with the class of its experiment.

    Sections that always exist are omitted, because their fields are tested.
    """
    shortest: dict = {}
    for cls in CLASSES:
        paths = sorted(paths_of(cls), key=lambda path: (path.count("."), not path.startswith("actor")))
        for path in paths:
            entry = paths_of(cls)[path]
            always = entry.shape == "sections" or (entry.shape == "section" and entry.default is not None)
            if not always and "dataset.scheduling_spec." not in path:
                shortest.setdefault((entry.owner, entry.name), (cls, path, entry))
    return shortest


def accepted_fields():
    return [
        pytest.param(cls, path, entry, id=f"{entry.owner}.{entry.name}")
        for cls, path, entry in one_path_per_field().values()
        if not entry.info.refused and entry.info.choices != (entry.default,)
    ]


def other_value(path, entry):
    """A valid value other than the default."""
    if path in VALUES:
        return VALUES[path]
    default, info = entry.default, entry.info
    if entry.shape == "section":
        return {}
    if entry.shape == "sections":
        return [{"env_vars": {"A": "1"}}]
    if entry.shape == "dict":
        return {"some": "thing"}
    if info.choices:
        return next((choice for choice in info.choices if choice not in (default, "auto")), None)
    if entry.shape == "list":
        return {int: [3], str: ["some"], float: [0.5]}[entry.kind]
    if entry.kind is bool:
        return not default
    if entry.kind is str:
        return "some-text"
    return _number(default, info, entry.kind)


def _number(default, info, kind):
    low = info.minimum if info.minimum is not None else info.above if info.above is not None else 0
    high = info.maximum if info.maximum is not None else info.below if info.below is not None else low + 8
    candidates = [low + 3, low + 2, high - 1, (low + high) / 2, low + (high - low) / 4]
    values = [kind(value) for value in candidates if low < value < high]
    return next(value for value in values if value != default)


def companions(path, cls):
    needs: dict = {}
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        needs |= COMPANIONS.get(".".join(parts[:length]), {})
    return needs if cls is GRPOConfig else {name: value for name, value in needs.items() if not name.startswith("ref")}


@pytest.mark.parametrize(("cls", "path", "entry"), accepted_fields())
def test_another_value_of_a_field_is_kept(cls, path, entry, monkeypatch):
    monkeypatch.setenv("some", "thing")  # env_vars of workers are saved as references to the environment
    monkeypatch.setattr("areno.config.packages.missing_packages", lambda extra: "")
    monkeypatch.setattr("areno.config.experiment.engine_sections.missing_packages", lambda extra: "")
    value = other_value(path, entry)
    assert value != entry.default
    tree = changed(SAMPLES[cls], companions(path, cls) | {path: value})
    words = MUST_AGREE.get(path) or disagreement(path, entry.name)
    if words:
        with pytest.raises(UsageError, match=words):
            config_from(tree, cls)
        return
    config = config_from(tree, cls)
    kept = {name: setting for name, _, setting in walk(config)}[path]
    if entry.shape == "section":
        assert isinstance(kept, entry.kind)
    else:
        assert kept == value
        assert entry.shape != "scalar" or isinstance(kept, entry.kind)
    again = config_from(yaml.load(config_text(config), yaml.CSafeLoader), cls)
    assert again == config or entry.name in SECRETS


def disagreement(path, name):
    """A part of the error if a section sets its own name or fileroot; empty if it may do so."""
    section = path.rpartition(".")[0]
    own_root = name == "fileroot" and section in ("cluster", "saver", "recover")
    return "differs from" if section and name in ("experiment_name", "trial_name", "fileroot") and not own_root else ""


def test_every_unsupported_field_is_refused_with_its_declared_reason():
    fields = [field for field in one_path_per_field().values() if field[2].info.refused]
    assert len(fields) > 5
    assert {cls for cls, _, _ in fields} == {GRPOConfig}
    values = {path: other_value(path, entry) for _, path, entry in fields}
    assert all(values[path] != entry.default for _, path, entry in fields)
    with pytest.raises(UsageError) as caught:
        config_from(changed(SAMPLES[GRPOConfig], values), GRPOConfig)
    problems = str(caught.value).splitlines()
    for _, path, entry in fields:
        section, _, name = path.rpartition(".")
        hits = [line for line in problems if entry.info.refused in line and (f" {section}: " in line or not section)]
        assert any(re.search(rf"[ ,]{name}(=|,|:)", line) for line in hits), path


def test_every_field_without_effect_is_accepted_and_listed_in_one_notice():
    fields = [field for field in one_path_per_field().values() if field[2].info.no_effect and not field[2].info.refused]
    assert len(fields) > 90
    values = {path: other_value(path, entry) for _, path, entry in fields}
    lines = notice(config_from(changed(SAMPLES[GRPOConfig], values), GRPOConfig)).splitlines()
    for _, path, entry in fields:
        section, name, reason = "", path.rpartition(".")[2], entry.info.no_effect
        if (match := re.match(r"actor\.(archon|megatron)", path)) is not None:  # the sample trains with fsdp
            section, reason = match[1], UNUSED_BACKEND
        assert any((section or name) in line and line.endswith(reason) for line in lines), path


@pytest.mark.parametrize("backend", ["archon", "megatron"])
def test_settings_of_the_training_backend_are_listed_individually(backend):
    fields = [field for field in one_path_per_field().values() if field[1].startswith(f"actor.{backend}.")]
    kept = {path: (other_value(path, entry), entry.info.no_effect) for _, path, entry in fields if "fp8" not in path}
    values = {path: value for path, (value, _) in kept.items() if value != {}}
    values.pop("actor.archon.offload_params", None)  # refused
    config = config_from(changed(SAMPLES[GRPOConfig], values | {"actor.backend": f"{backend}:d2p2"}), GRPOConfig)
    idle, _, acting = notice(config).partition(f"areno's engine trains instead of {backend}")
    for path in values:
        reason = kept[path][1]
        lines = [line for line in (idle if reason else acting).splitlines() if path.rpartition(".")[2] in line]
        if path.startswith("actor.archon.pp_"):
            continue  # shown by the layout
        assert any(line.endswith(reason) for line in lines), path


@pytest.mark.parametrize("cls", CLASSES)
def test_a_saved_configuration_causes_no_notice(cls):
    assert notice(config_from(yaml.safe_load(config_text(config_from(SAMPLES[cls], cls))), cls)) == ""


@pytest.mark.parametrize(
    ("cls", "path", "value", "words"),
    [
        (cls, path, value, words)
        for cls, path, entry in one_path_per_field().values()
        for value, words in entry.info.refused_values.items()
    ],
)
def test_a_refused_value_is_refused_with_its_declared_reason(cls, path, value, words):
    with pytest.raises(UsageError) as caught:
        config_from(changed(SAMPLES[cls], {path: value}), cls)
    assert f"{path.rpartition('.')[0]}: {path.rpartition('.')[2]}={value}: {words}" in str(caught.value)


def owners():
    entries = {}
    for cls in CLASSES:
        for entry in paths_of(cls).values():
            entries[f"{entry.owner}.{entry.name}"] = entry
    return entries


def test_every_field_is_refused_or_has_no_effect_or_is_shown_by_a_test():
    known = owners()
    for key, entry in known.items():
        reasons = [bool(entry.info.refused), bool(entry.info.no_effect), key in EFFECTS]
        assert sum(reasons) == 1 or entry.is_section, key
    assert set(EFFECTS) <= set(known)


def test_refused_values_are_choices():
    for entry in owners().values():
        assert not entry.info.refused_values or set(entry.info.refused_values) < set(entry.info.choices)


def test_the_tests_that_show_effects_exist():
    shown = {tuple(test.split("::")) for test in EFFECTS.values()}
    for file in {file for file, _ in shown}:
        tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {name for of, name in shown if of == file} <= there, file


def test_declared_reasons_say_what_to_do():
    for key, entry in owners().items():
        for words in filter(None, (entry.info.refused, *entry.info.refused_values.values())):
            assert "; " in words, key
            assert not words.endswith("."), key
        assert not entry.info.no_effect.endswith("."), key


@pytest.mark.parametrize("cls", CLASSES)
def test_all_defaults_are_accepted_when_written_out(cls):
    text = config_text(config_from(SAMPLES[cls], cls))
    assert all(f"{name}:" in text for name in settings_of(cls))
    config_from(yaml.safe_load(text), cls)


@pytest.mark.parametrize("cls", CLASSES)
def test_settings_are_the_same_with_and_without_omegaconf(cls):
    plain = config_from(SAMPLES[cls], cls)
    assert config_from(changed(SAMPLES[cls], {"trial_name": "${oc.decode:trial0}"}), cls) == plain
