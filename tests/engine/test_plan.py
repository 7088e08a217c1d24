"""The memory account against real models and the real machine, and ``--dry-run``, which prints it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import yaml

from areno.config import TrainOptions
from areno.engine.model.loading import LoadOptions, load_causal_lm
from areno.engine.plan.estimate import estimate_memory, estimate_memory_text
from areno.engine.plan.memory import KV_SHARE, available_bytes, default_kv_tokens
from areno.engine.rollout.probe import prove_decoding
from areno.errors import UsageError
from tests.support.cli import areno, task_arguments, write_task
from tests.support.tiny import save_tiny_checkpoint

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_moe", "gpt2")


def options(checkpoint, **changes):
    return dataclasses.replace(TrainOptions(ckpt=str(checkpoint), device="cpu"), **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_optimizer_are_those_of_the_real_model(family, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / family, family)
    model = load_causal_lm(str(checkpoint), LoadOptions(dtype=torch.float32))
    estimate = estimate_memory(options(checkpoint))
    count = sum(p.numel() for p in model.module.parameters())
    assert estimate.parameters == count
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4 * count, 4 * count, 8 * count)
    half = estimate_memory(options(checkpoint, dtype="bfloat16"))
    assert (half.weights, half.gradients, half.optimizer) == (2 * count, 4 * count, 12 * count)


def test_tied_weights_are_counted_once(tmp_path):
    folders = [save_tiny_checkpoint(tmp_path / str(tie), tie_word_embeddings=tie) for tie in (True, False)]
    tied, free = (estimate_memory(options(folder)).parameters for folder in folders)
    config = json.loads((folders[0] / "config.json").read_text())
    assert free - tied == config["vocab_size"] * config["hidden_size"]


def test_the_cache_figure_is_tokens_times_what_a_token_really_takes(tiny_checkpoint):
    model = load_causal_lm(str(tiny_checkpoint), LoadOptions(dtype=torch.float32))
    per_token = prove_decoding(model, str(tiny_checkpoint)).bytes_per_token
    run = options(tiny_checkpoint, batch_size=4, n_samples=2, max_prompt_tokens=50, max_new_tokens=30)
    assert estimate_memory(run).kv_cache == 8 * 80 * per_token
    assert estimate_memory(dataclasses.replace(run, max_running_prompts=3)).kv_cache == 3 * 80 * per_token
    assert estimate_memory(dataclasses.replace(run, kv_cache_tokens=100)).kv_cache == 100 * per_token
    assert estimate_memory(dataclasses.replace(run, algo="sft")).kv_cache == 0


def test_smaller_microbatches_and_recomputation_take_less_memory(tiny_checkpoint):
    large = estimate_memory(options(tiny_checkpoint, mini_bs=16)).activations
    assert estimate_memory(options(tiny_checkpoint, mini_bs=4)).activations * 4 == large
    assert estimate_memory(options(tiny_checkpoint, mini_bs=16, activation_checkpointing=False)).activations > large


def test_roles_are_counted_where_a_run_holds_them(tiny_checkpoint):
    def roles(**values):
        return estimate_memory(options(tiny_checkpoint, **values)).roles

    weights = estimate_memory(options(tiny_checkpoint)).weights
    trained = 4 * weights  # fp32: weights, gradients and two moments
    assert roles(algo="ppo") == weights + trained
    assert roles(algo="ppo", use_kl_loss=False) == trained
    assert roles(algo="ppo", use_kl_loss=False, reward_ckpt=str(tiny_checkpoint)) == trained + weights
    assert (roles(algo="grpo"), roles(algo="grpo", kl_coef=0.1), roles(algo="dpo")) == (0, weights, 0)


def test_the_table_says_whether_it_fits(tiny_checkpoint):
    small = {"batch_size": 2, "max_prompt_tokens": 64, "max_new_tokens": 64}
    assert estimate_memory_text(options(tiny_checkpoint, **small)).endswith("It fits.")
    crowded = estimate_memory_text(options(tiny_checkpoint, batch_size=10**6, max_new_tokens=64))
    assert "KV cache smaller than the worst case" in crowded
    huge = estimate_memory_text(options(tiny_checkpoint, mini_bs=10**7))
    assert huge.endswith("It may not fit: lower --mini-bs, --max-new-tokens or --max-prompt-tokens.")


def test_a_checkpoint_without_a_usable_configuration_is_a_usage_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))
    with pytest.raises(UsageError, match="its configuration cannot be read"):
        estimate_memory(options(tmp_path))


def test_this_machine_has_memory_to_give():
    free = available_bytes(CPU)
    assert 2**20 < free < 2**50
    assert default_kv_tokens(CPU, 1000) == pytest.approx(free * KV_SHARE / 1000, rel=0.5)


def test_a_cache_budget_is_never_too_small_to_start():
    assert default_kv_tokens(CPU, 2**60) == 1024


def test_a_dry_run_prints_configuration_and_memory_and_writes_nothing(tmp_path, tiny_checkpoint):
    task = write_task(tmp_path / "task")
    before = sorted(tmp_path.rglob("*"))
    done = areno(*task_arguments("grpo", tiny_checkpoint, task, tmp_path / "run"), "--dry-run")
    assert done.returncode == 0, done.stderr
    title, _, rest = done.stdout.partition("\nResolved configuration\n----------------------\n")
    assert title.startswith("AReno training config\n")
    config, _, memory = rest.partition("\nMemory\n------\n")
    assert yaml.safe_load(config)["lr"] == 1e-3
    assert "Memory, a rough estimate (0.0" in memory
    assert memory.rstrip().endswith("It fits.")
    written = [path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(written) == before
