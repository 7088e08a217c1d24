"""Settings that depend on other sections; names, tokenizers and agents across sections."""

from __future__ import annotations

import pytest

from areno.config.experiment import GRPOConfig
from areno.config.experiment.notices import notice
from areno.config.experiment.setting_declaration import paths_of
from tests.config.experiment.samples import accepted, refused

VALID = {"valid_dataset.path": "held.jsonl", "valid_dataset.type": "rl", "evaluator.freq_steps": 5}


def test_the_help_of_every_setting_is_a_short_sentence():
    for path, entry in paths_of(GRPOConfig).items():
        assert entry.info.help.endswith("."), path
        assert len(entry.info.help) < 200, path


def test_settings_that_another_section_decides_are_refused():
    cases = {
        "critic.dtype": "float32",
        "critic.gradient_checkpointing": True,
        "ref.init_from_scratch": True,
        "ref.request_timeout": 5.0,
    }
    for path, value in cases.items():
        role = path.partition(".")[0]
        changes = {path: value, "actor.dtype": "bfloat16"} | ({"critic.optimizer": {}} if role == "critic" else {})
        assert f"has no effect: {role} runs in the actor's engine" in refused(changes), path
    fsdp = {"critic.optimizer": {}, "critic.fsdp": {"per_layer_optim_step": True, "memory_efficient_load": True}}
    assert "critic.fsdp" in refused(fsdp)
    accepted({"ref": "${actor}", "actor.gradient_checkpointing": True})
    accepted({"ref.mb_spec.max_tokens_per_mb": 64})


def test_a_teacher_is_not_the_random_model_that_it_teaches():
    changes = {"actor.init_from_scratch": True, "teacher": {"path": "${actor.path}"}}
    assert "teacher.path some/model is also actor.path, but actor.init_from_scratch gives" in refused(changes)


def test_a_model_has_one_tokenizer():
    assert "tokenizer_path 'other' differs from actor.path 'some/model'" in refused({"tokenizer_path": "other"})
    assert "rollout.tokenizer_path 'other' differs" in refused({"rollout.tokenizer_path": "other"})
    assert accepted({"tokenizer_path": "${actor.path}"}).rollout.tokenizer_path == "some/model"


def test_an_evaluation_uses_all_rows():
    changes = VALID | {"valid_dataset.batch_size": 3, "valid_dataset.shuffle": True}
    assert "  batch_size, shuffle of valid_dataset: an evaluation uses all rows" in notice(accepted(changes))
    assert "  valid_dataset.drop_last: an evaluation uses all rows" in notice(
        accepted(VALID | {"valid_dataset.drop_last": True})
    )
    no_rest = VALID | {"valid_dataset.drop_last": True, "train_dataset.drop_last": False}
    assert "valid_dataset.drop_last true has no effect" in refused(no_rest)


def test_env_vars_apply_only_to_started_processes():
    assert "env_vars" in refused({"rollout.agent.scheduling_spec.0.env_vars": {"A": "1"}})
    changes = {"ref": {}, "ref.scheduling_spec.0.env_vars": {"A": "1"}}
    assert "move the variables to actor.scheduling_spec.0.env_vars" in refused(changes)
    accepted(changes | {"actor.scheduling_spec.0.env_vars": {"A": "1"}})
    assert "in the second entry" in refused({"rollout.scheduling_spec": [{}, {"env_vars": {"A": "1"}}]})
    accepted({"rollout.scheduling_spec.0.env_vars": {"A": "1"}})


def test_a_teacher_has_the_section_of_its_engine_and_inherits_the_rest_from_the_actor():
    teacher = {"teacher.path": "t", "teacher.rollout": {}}
    accepted(teacher)
    accepted({"teacher.path": "t", "teacher.train": {}, "teacher.engine_type": "train"})
    accepted({"teacher.path": "t"})
    assert "teacher.engine_type: areno starts no separate engine" in notice(
        accepted({"teacher": {"path": "t", "engine_type": "train"}})
    )
    assert "teacher.rollout.queue_size 3 has no effect" in refused(teacher | {"teacher.rollout.queue_size": 3})


@pytest.mark.parametrize("name", ["experiment_name", "trial_name"])
@pytest.mark.parametrize("value", ["..", ".", ".hidden", "a\nb", "a\x1b[2J", " a", "a\t"])
def test_names_must_be_valid_folder_names(name, value):
    assert f"{name} {value!r}" in refused({name: value})


def test_conversations_always_continue_their_own_tokens():
    agent = {"workflow.path": "agent", "rollout.agent.agent_cls_path": "a.py:B", "rollout.agent.export_style": "concat"}
    assert notice(accepted(agent)) == ""
    changes = agent | {"rollout.agent.chat_template_type": "concat"}
    assert "  rollout.agent.chat_template_type: hf and concat do the same: a request reuses" in notice(
        accepted(changes)
    )


def test_agent_settings_have_no_effect_without_an_agent():
    agent = {"rollout.agent": {"turn_discount": 0.5, "export_style": "concat", "admin_api_key": "some-key"}}
    assert "export_style, turn_discount of rollout.agent" in notice(accepted(agent)).replace(
        "turn_discount, export_style", "export_style, turn_discount"
    )
    accepted({"memory_profiler": {"profile_steps": [1]}})


def test_settings_of_the_reward_function_have_no_effect_if_the_workflow_computes_rewards():
    reward = {"fn": "r.py:f", "timeout_seconds": 3.0, "max_retries": 1, "max_workers": 2}
    reward |= {"on_error": "stop", "normalize_parts": True, "weights": {"a": 2}}  # apply to all workflows
    custom = {"workflow.path": "w.py:Own"}
    agent = {"workflow.path": "agent", "rollout.agent.agent_cls_path": "a.py:B"}
    for changes in (custom, agent):
        text = notice(accepted(changes | {"reward": reward}))
        assert "  fn, timeout_seconds, max_retries, max_workers of reward: only read by the workflows rlvr and" in text
        assert notice(accepted(changes)) == ""
    for path in ("rlvr", "multi_turn"):
        assert notice(accepted({"workflow.path": path, "reward": reward})) == ""


def test_async_training_must_agree_with_max_head_offpolicyness():
    ahead = {"rollout.max_head_offpolicyness": 2}
    assert "async_training: rollout.max_head_offpolicyness controls" in notice(
        accepted(ahead | {"async_training": True})
    )
    accepted({"async_training": False})
    assert "contradicts rollout.max_head_offpolicyness 0" in refused({"async_training": True})
    assert "contradicts rollout.max_head_offpolicyness 2" in refused(ahead | {"async_training": False})


def test_settings_without_effect_are_listed_in_the_notice():
    cases = {
        "valid_dataset": {"valid_dataset.path": "x", "valid_dataset.type": "rl"},
        "eps_clip": {"actor.use_sapo_loss": True, "actor.eps_clip": 0.4},
        "ref.optimizer": {"ref.optimizer": {"lr": 1.0}},
        "ref.mb_spec": {"ref.mb_spec": {"n_mbs": 2, "granularity": 2}},
        "ref.scheduling_spec.0.cpu": {"ref.scheduling_spec.0.cpu": 4},
        "launcher": {"launcher": {"trainer_cpus_per_gpu": 4}},
        "vllm.model: servers load the actor's model": {"rollout.backend": "vllm:d1", "vllm.model": "other/model"},
        "sglang.model_path: servers": {"rollout.backend": "sglang:d1", "sglang.model_path": "other/model"},
        "actor.optimizer_dtype: adam_8bit has 8-bit moments": {
            "actor.optimizer_dtype": "bf16",
            "actor.optimizer.type": "adam_8bit",
        },
        "cluster.n_gpus_per_node: Ray": {"scheduler.type": "ray", "cluster.n_gpus_per_node": 4},
        "profile_steps of perf_tracer: perf_tracer.enabled is false": {
            "perf_tracer": {"profile_steps": [1], "save_interval": 2}
        },
        "actor.log_agent_stats: log_agent_stats_keys is empty": {"actor.log_agent_stats": True},
    }
    for name, changes in cases.items():
        assert name in notice(accepted(changes)), name
    effective = (
        {"rollout.backend": "vllm:d1", "vllm.model": "${actor.path}"},
        {"actor.optimizer_dtype": "bf16", "actor.optimizer.type": "adam_bf16"},
        {"scheduler.type": "ray", "cluster.n_gpus_per_node": 0},
        {"perf_tracer": {"enabled": True, "profile_steps": [1], "save_interval": 2}},
        {"actor.log_agent_stats": True, "actor.log_agent_stats_keys": ["tools"]},
    )
    for changes in effective:
        assert notice(accepted(changes)) == "", changes
    assert "log_agent_stats_keys contains an empty key" in refused(
        {"actor.log_agent_stats": True, "actor.log_agent_stats_keys": ["tools", " "]}
    )
