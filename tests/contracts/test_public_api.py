"""The names, signatures, field orders and defaults that user programs rely on; a change here is a breaking change."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

import areno
import areno.api
import areno.api.agentic as agentic
from areno import errors
from areno.config import TrainOptions, options_of

PUBLIC = [
    "AlgorithmSpec",
    "Areno",
    "ArenoConfig",
    "Backend",
    "BackendType",
    "ModelRole",
    "PromptBatch",
    "PromptItem",
    "RewardEvent",
    "RewardRecord",
    "RolloutResult",
    "RolloutSequence",
    "RolloutSession",
    "SamplingParams",
    "TrainSequence",
    "Trainer",
    "compute_gae",
    "compute_group_advantages",
    "dpo_loss_fn",
    "encode_generation_prompt",
    "get_algorithm",
    "grpo_loss_fn",
    "gspo_loss_fn",
    "kl_penalty",
    "list_advantages",
    "list_algorithms",
    "ppo_loss_fn",
    "register_advantage",
    "register_algorithm",
    "register_backend",
    "reward_model_loss_fn",
    "sft_loss_fn",
    "value_loss_fn",
]
NEEDED = inspect.Parameter.empty

# Documented parameters in order, with their defaults; keyword-only parameters follow `*`.
SIGNATURES = {
    "__init__": {
        "world_size": NEEDED,
        "model_path": NEEDED,
        "backend_type": None,
        "custom_config": None,
        "metrics_log_dir": None,
    },
    "init": {},
    "get_tokenizer": {},
    "load_prompt_batches": {
        "dataset": NEEDED,
        "*": None,
        "batch_size": NEEDED,
        "max_prompt_tokens": NEEDED,
        "prompt_key": "prompt",
        "solutions_key": "solutions",
    },
    "rollout_batch": {"prompts": NEEDED, "n_samples": NEEDED, "sampling_params": NEEDED},
    "rollout_token_batch": {"prompt_tokens": NEEDED, "n_samples": NEEDED, "sampling_params": NEEDED},
    "rollout_session": {
        "*": None,
        "sampling_params": NEEDED,
        "loss_mask_policy": None,
        "max_running_prompts": None,
        "timeout_s": 300.0,
        "proxy": True,
    },
    "train": {"batch_data": NEEDED, "loss_fn": NEEDED, "mini_bs": 8, "gradient_accumulation_steps": None},
    "ensure_roles": {"roles": NEEDED},
    "score_logprobs": {"role": NEEDED, "token_rows": NEEDED},
    "score_values": {"role": NEEDED, "token_rows": NEEDED},
    "score_rewards": {"role": NEEDED, "token_rows": NEEDED},
    "train_values": {
        "role": NEEDED,
        "batch_data": NEEDED,
        "mini_bs": NEEDED,
        "gradient_accumulation_steps": None,
        "*": None,
        "cliprange_value": 0.5,
        "value_loss_coef": 0.5,
    },
    "save_checkpoint": {"path": NEEDED},
    "close": {},
}

# Fields in the documented order with their defaults; a list that is None becomes a new empty list.
FIELDS = {
    "SamplingParams": {
        "greedy": False,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 16,
        "max_context_len": None,
        "temperature": 1.0,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "max_prompt_len": None,
    },
    "TrainSequence": {
        "prompt_mask": None,
        "tokens": None,
        "logprobs": None,
        "advantages": None,
        "returns": None,
        "values": None,
        "ref_logprobs": None,
        "reward": 0.0,
        "eos_token_id": 0,
    },
    "ModelRole": {"name": NEEDED, "path": NEEDED, "trainable": NEEDED, "optimizer_lr": None},
    "ArenoConfig": {
        "model_path": None,
        "tp_size": 1,
        "dp_size": None,
        "devices": None,
        "dummy_load": False,
        "optimizer": None,
        "runtime": None,
        "max_running_prompts": 64,
        "decode_progress_interval_s": 10.0,
    },
}
KL = {"kl_coef": 0.0, "kl_type": "low_var_kl"}
# Parameters after the data pack and the model's predictions.
LOSSES = {
    "sft_loss_fn": {},
    "gspo_loss_fn": {"clip_eps": 3.0e-4, "clip_eps_high": None, **KL},
    "grpo_loss_fn": {
        "clip_eps": 0.2,
        "clip_eps_high": None,
        "dual_clip": None,
        "loss_mean": "token",
        "max_tokens": None,
        **KL,
    },
    "ppo_loss_fn": {
        "clip_eps": 0.2,
        "clip_eps_high": None,
        "clip_ratio_c": 3.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
    },
    "dpo_loss_fn": {"beta": 0.1, "label_smoothing": 0.0, "loss_type": "sigmoid", "length_normalized": False},
    "value_loss_fn": {"cliprange_value": 0.5, "value_loss_coef": 0.5},
    "reward_model_loss_fn": {},
}
PREDICTED = {"value_loss_fn": "values", "reward_model_loss_fn": "scores"}
AGENTIC = {
    "AgentTrajectoryTurn": {
        "item": NEEDED,
        "messages": NEEDED,
        "response": None,
        "response_tokens": [],
        "response_logprobs": [],
        "parsed_tool_calls": [],
        "model": "policy",
        "tools": [],
        "tool_choice": None,
        "reward": None,
    },
    "AgentTrajectory": {"turns": []},
    "AgentBatch": {"records": NEEDED, "prompts": NEEDED, "input_tokens": NEEDED, "n_samples": NEEDED},
    "LossMaskPolicy": {
        "assistant_text": True,
        "assistant_tool_calls": True,
        "tool_results": False,
        "final_assistant_text": True,
        "system_prompt": False,
        "user_prompt": False,
        "forced_tokens": False,
    },
}

OPTIONS = {
    "ckpt": None,
    "dataset_path": None,
    "dataset_loader_fn": None,
    "algo": "gspo",
    "epochs": 10,
    "max_steps": None,
    "max_sequences": None,
    "world_size": 1,
    "stall_timeout": 600.0,
    "tp_size": 1,
    "fsdp": False,
    "seed": 0,
    "shuffle": True,
    "device": "auto",
    "dtype": "auto",
    "trust_remote_code": False,
    "config": None,
    "dry_run": False,
    "batch_size": 32,
    "n_samples": 8,
    "max_running_prompts": None,
    "max_prompt_tokens": 1024,
    "max_new_tokens": 3071,
    "max_context_len": None,
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1.0,
    "greedy": False,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "kv_cache_tokens": None,
    "eager_decode": False,
    "speculate": 0,
    "return_routed_experts": False,
    "drop_rollout_state": False,
    "attn_backend": "flash",
    "disable_thinking": False,
    "rollout": "sync",
    "rollout_replicas": 1,
    "rollout_backend": "areno",
    "rollout_url": (),
    "rollout_server_command": None,
    "rollout_server_args": None,
    "max_staleness": 1,
    "workflow": None,
    "agent_fn": None,
    "agent_timeout_s": 300.0,
    "agent_retries": 1,
    "agent_max_failures": 0.5,
    "train_tool_results": False,
    "turn_discount": None,
    "reward_fn_path": None,
    "reward_weights": None,
    "reward_normalize_parts": False,
    "reward_ckpt": None,
    "reward_timeout_s": 60.0,
    "reward_workers": None,
    "reward_memory_gb": None,
    "on_reward_error": "stop",
    "tune_params": False,
    "mem_frac": 0.9,
    "tune_max_samples": 256,
    "mini_bs": 16,
    "gradient_accumulation_steps": None,
    "activation_checkpointing": True,
    "tree_training": True,
    "offload_activations": False,
    "lr": 1e-6,
    "min_lr": 1e-7,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 1000,
    "lr_decay_style": "cosine",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "adam_8bit": False,
    "offload_optimizer": False,
    "weight_decay": 0.01,
    "grad_clip_norm": 1.0,
    "score_micro_bs": 8,
    "update_epochs": 1,
    "update_minibatches": 1,
    "ref_ckpt": None,
    "critic_ckpt": None,
    "critic_lr": 1e-5,
    "critic_min_lr": 0.0,
    "critic_lr_warmup_steps": 0,
    "critic_lr_decay_steps": 1000,
    "critic_lr_decay_style": "constant",
    "critic_grad_clip_norm": 1.0,
    "critic_warmup_steps": 20,
    "gspo_clip_eps": 3e-4,
    "grpo_clip_eps": 0.2,
    "clip_eps_high": None,
    "grpo_dual_clip": None,
    "grpo_loss_mean": "token",
    "advantage": "group",
    "kl_coef": 0.0,
    "dpo_beta": 0.1,
    "dpo_loss_type": "sigmoid",
    "dpo_label_smoothing": 0.0,
    "dpo_length_normalized": False,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "kl_loss_type": "low_var_kl",
    "kl_reward_coef": 0.0,
    "kl_reward_type": "k1",
    "clip_eps": 0.2,
    "clip_ratio_c": 3.0,
    "value_clip_eps": 0.5,
    "value_loss_coef": 0.5,
    "bootstrap_truncated": True,
    "whiten_advantages": True,
    "gamma": 1.0,
    "lam": 0.95,
    "lora_rank": 0,
    "lora_alpha": None,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
    "lora_adapter_path": None,
    "load_in_4bit": False,
    "run_dir": None,
    "save_path": None,
    "save_interval": 100,
    "save_interval_minutes": None,
    "keep_checkpoints": None,
    "keep_best": False,
    "model_save_interval": None,
    "save_async": True,
    "resume": None,
    "resume_step": None,
    "eval_dataset_path": None,
    "eval_dataset_loader_fn": None,
    "eval_interval": 100,
    "eval_before_train": True,
    "early_stop_patience": None,
    "eval_max_rows": None,
    "eval_n_samples": 1,
    "eval_temperature": None,
    "metrics_log_dir": None,
    "track": (),
    "track_project": "areno",
    "save_rollouts": None,
    "trace": False,
    "log_level": "auto",
}


def test_the_public_names_do_not_change():
    assert sorted(areno.api.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_is_the_same_object_in_areno_and_in_its_api(name):
    assert getattr(areno, name) is getattr(areno.api, name)
    assert name in dir(areno)
    assert name in dir(areno.api)


@pytest.mark.parametrize(
    ("error", "base"),
    [(errors.UsageError, ValueError), (errors.DataError, ValueError), (errors.EngineError, RuntimeError)],
)
def test_programs_may_catch_areno_errors_as_built_in_exceptions(error, base):
    assert issubclass(error, base)
    assert issubclass(error, errors.ArenoError)
    again = pickle.loads(pickle.dumps(error("--lr 0: give a rate above 0")))
    assert type(again) is error
    assert str(again) == "--lr 0: give a rate above 0"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        areno.Trainr  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        areno.api.Trainr  # noqa: B018


@pytest.mark.parametrize(("method", "documented"), SIGNATURES.items(), ids=SIGNATURES)
def test_trainer_methods_keep_their_parameters_and_defaults(method, documented):
    parameters = list(inspect.signature(getattr(areno.Trainer, method)).parameters.values())[1:]
    names = list(documented)
    positional = names[: names.index("*")] if "*" in names else names
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    by_name = {p.name: p for p in parameters}
    assert {name: by_name[name].default for name in names if name != "*"} == {
        name: default for name, default in documented.items() if name != "*"
    }
    further = [p for p in parameters if p.name not in documented]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not NEEDED for p in further)


@pytest.mark.parametrize(("cls", "documented"), FIELDS.items(), ids=FIELDS)
def test_data_classes_keep_field_order_and_defaults(cls, documented):
    fields = dataclasses.fields(getattr(areno, cls))
    assert [field.name for field in fields][: len(documented)] == list(documented)
    defaults = {
        f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields[: len(documented)]
    }
    wanted = {name: dataclasses.MISSING if value is NEEDED else value for name, value in documented.items()}
    assert defaults == wanted
    # Fields after the documented ones have a default, so that positional calls keep working.
    rest = fields[len(documented) :]
    assert all(f.default is not dataclasses.MISSING or callable(f.default_factory) for f in rest)


@pytest.mark.parametrize(("cls", "documented"), AGENTIC.items(), ids=AGENTIC)
def test_agentic_data_classes_keep_field_order_and_defaults(cls, documented):
    fields = dataclasses.fields(getattr(agentic, cls))
    defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields}
    assert {name: NEEDED if value is dataclasses.MISSING else value for name, value in defaults.items()} == documented
    assert [f.name for f in fields] == list(documented)


def test_the_agentic_names_do_not_change():
    names = "AgentBatch AgentContext AgentItem AgentSample AgentTrajectory AgentTrajectoryTurn LossMaskPolicy "
    names += "RewardEvent RewardRecord RolloutSession TrajectoryRow lint_chat_template"
    assert sorted(agentic.__all__) == names.split()
    assert all(getattr(agentic, name) for name in agentic.__all__)
    assert agentic.RewardRecord is areno.RewardRecord
    assert agentic.RolloutSession is areno.RolloutSession


@pytest.mark.parametrize(("loss", "further"), LOSSES.items(), ids=LOSSES)
def test_losses_take_the_pack_and_the_logprobs_first(loss, further):
    parameters = inspect.signature(getattr(areno.loss_fns, loss)).parameters
    assert list(parameters)[:2] == ["data_pack", PREDICTED.get(loss, "logprobs")]
    assert {name: p.default for name, p in list(parameters.items())[2:]} == further


def test_the_options_of_training_and_their_defaults_do_not_change():
    assert {option.name: option.default for option in options_of(TrainOptions)} == OPTIONS


def test_a_star_import_has_all_public_names():
    names: dict[str, object] = {}
    exec("from areno import *", names)
    assert set(PUBLIC) <= names.keys()
