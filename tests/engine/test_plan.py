"""The memory plan against real models, real steps and the real machine, and the commands that print it."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
import torch
import yaml

from areno.cli.main import main
from areno.config import TrainOptions
from areno.config.algorithms import get_algorithm
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.loading import LoadOptions, load_causal_lm, load_value_model
from areno.engine.plan import memory_plan
from areno.engine.plan.advice import advise
from areno.engine.plan.live_bytes import LiveBytes
from areno.engine.plan.memory_plan import make_plan
from areno.engine.plan.memory_probe import (
    KV_SHARE,
    available_bytes,
    begin_peak,
    default_kv_tokens,
    held_memory,
    peak_since,
    return_freed_memory,
)
from areno.engine.plan.sizes import RunSizes
from areno.engine.plan.table import plan_text
from areno.engine.rollout.probe import validate_decoding
from areno.engine.train import step as step_module
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.step import TrainStep
from areno.errors import UsageError
from areno.loss_fns import sft_loss_fn
from areno.types import Request, SamplingParams, TrainSequence
from tests.support.cli import areno, task_arguments, write_task
from tests.support.examples import some_quick
from tests.support.tiny import FAMILIES, save_tiny_checkpoint

CPU = torch.device("cpu")
MIB = 2**20
SIZES = {"batch_size": 4, "n_samples": 2, "mini_bs": 4, "max_prompt_tokens": 40, "max_new_tokens": 24}


def options(checkpoint, **changes):
    run = TrainOptions(ckpt=str(checkpoint), device="cpu", algo="grpo", **SIZES)
    return dataclasses.replace(run, **changes, explicit=frozenset(changes))


def part(plan, phase, name):
    return plan.phase(phase).parts[name]


@pytest.mark.parametrize("family", some_quick(FAMILIES, "llama", "qwen3_moe", "qwen3_5"))
def test_every_family_can_be_planned_and_its_weights_are_exact(family, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / family, family)
    module = load_causal_lm(str(checkpoint), LoadOptions(dtype=torch.float32)).module
    plan = make_plan(options(checkpoint))
    tensors = {t.data_ptr(): t.untyped_storage().nbytes() for t in [*module.parameters(), *module.buffers()]}
    assert plan.parameters == sum(p.numel() for p in module.parameters())
    assert part(plan, "load", "weights") == sum(tensors.values())
    assert part(plan, "backward", "gradients") == 4 * plan.parameters
    assert all(
        phase.parts["activations"] > 0 for phase in plan.phases if phase.name in ("rollout", "forward", "backward")
    )


def test_planned_optimizer_states_equal_those_of_the_optimizer(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "model", hidden=128, heads=4)
    for dtype, low in (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)):
        plan = make_plan(options(checkpoint, dtype=dtype, adam_8bit=low))
        model = load_causal_lm(str(checkpoint), LoadOptions(dtype=getattr(torch, dtype)))
        optimizer = MasterAdamW(model.parameters(), OptimizerOptions(adam_8bit=low))
        optimizer.allocate()
        held = [part.values for part in optimizer.state_parts()]
        assert part(plan, "optimizer", "optimizer") == sum(t.numel() * t.element_size() for t in held)


def test_loading_in_another_type_counts_masters_and_the_file(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    same, half = (make_plan(options(checkpoint, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert (part(same, "load", "optimizer"), part(same, "load", "activations")) == (0, 0)
    assert part(half, "load", "optimizer") == 4 * half.parameters
    assert part(half, "load", "activations") == (checkpoint / "model.safetensors").stat().st_size


def test_tied_weights_are_counted_once(tmp_path):
    folders = [save_tiny_checkpoint(tmp_path / str(tie), tie_word_embeddings=tie) for tie in (True, False)]
    tied, free = (make_plan(options(folder)).parameters for folder in folders)
    config = json.loads((folders[0] / "config.json").read_text())
    assert free - tied == config["vocab_size"] * config["hidden_size"]


def test_live_bytes_count_real_tensors():
    with LiveBytes() as live:
        first = torch.ones(1000)
        view, second = first[:10], first * 2
        assert live.now == 8000
        del first, second
        assert live.now == 4000, "the view keeps its storage"
        del view
        assert (live.now, live.peak) == (0, 8000)


@pytest.mark.parametrize("family", some_quick(["llama", "gemma3", "qwen3_5", "qwen3_moe"], "llama", "qwen3_5"))
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_planned_step_allocates_what_a_real_one_does(family, checkpointing, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / family, family)
    run = options(checkpoint, algo="sft", activation_checkpointing=checkpointing)
    plan = make_plan(run)
    sizes = RunSizes(run, CPU)
    lengths, _ = sizes.microbatch(sizes.longest_row(None))
    rows = []
    for length, own in zip(lengths, sizes.scored(lengths), strict=True):
        mask = [index < length - own for index in range(length)]
        rows.append(TrainSequence(prompt_mask=mask, tokens=[5] * length, logprobs=[0.0] * length))
    model = load_causal_lm(str(checkpoint), LoadOptions(dtype=torch.float32))
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions()), checkpointing)
    step.set_training(True)
    with LiveBytes() as live:
        live.ignore([*model.module.parameters(), *model.module.buffers()])
        step.accumulate(rows, sft_loss_fn, len(rows))
    planned = part(plan, "backward", "gradients") + part(plan, "backward", "activations")
    assert planned == pytest.approx(live.peak, rel=0.05)


def test_a_planned_step_over_shared_prompts_allocates_what_a_real_one_does(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "model", "llama")
    sizes = {"batch_size": 1, "n_samples": 8, "mini_bs": 8, "max_prompt_tokens": 600, "max_new_tokens": 400}
    run = options(checkpoint, activation_checkpointing=False, **sizes)
    prompt_mask = [True] * 600 + [False] * 400
    rows = [
        TrainSequence(prompt_mask, [5] * 600 + [7 + answer] * 400, logprobs=[0.0] * 1000, advantages=[1.0] * 1000)
        for answer in range(8)
    ]
    model = load_causal_lm(str(checkpoint), LoadOptions(dtype=torch.float32))
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions()), False, tree=True)
    step.set_training(True)
    with LiveBytes() as live:
        live.ignore([*model.module.parameters(), *model.module.buffers()])
        step.accumulate(rows, get_algorithm("grpo").make_loss_fn(run), 8)
    plan = make_plan(run)
    planned = part(plan, "backward", "gradients") + part(plan, "backward", "activations")
    assert planned == pytest.approx(live.peak, rel=0.05)


def test_the_planned_cache_is_as_large_as_that_of_a_rollout(tiny_checkpoint):
    run = options(tiny_checkpoint, max_new_tokens=150)
    plan = make_plan(run)
    engine = Engine(str(tiny_checkpoint), EngineConfig(max_running=run.running_sequences, decode="eager"))
    sampling = SamplingParams(max_new_tokens=150, ignore_eos=True)
    requests = [Request([i] * 40, sampling, [0, 1]) for i in range(1, 5)]
    for future in engine.submit(requests):
        future.result()
    assert part(plan, "rollout", "kv_cache") == engine.loop.cache.nbytes()
    engine.close()


def test_the_cache_follows_its_options(tiny_checkpoint):
    model = load_causal_lm(str(tiny_checkpoint), LoadOptions(dtype=torch.float32))
    per_token = validate_decoding(model, str(tiny_checkpoint)).bytes_per_token
    run = options(tiny_checkpoint)
    assert make_plan(run).cache_wanted == 8 * 64
    small = make_plan(dataclasses.replace(run, n_samples=8, batch_size=8, kv_cache_tokens=1024))
    assert small.cache_tokens <= 1.5 * 1024
    assert part(small, "rollout", "kv_cache") == pytest.approx(small.cache_tokens * per_token, rel=0.01)
    assert make_plan(dataclasses.replace(run, algo="sft")).phase("rollout") is None
    kept, dropped = (make_plan(dataclasses.replace(run, drop_rollout_state=drop)) for drop in (False, True))
    assert part(kept, "forward", "kv_cache") == part(kept, "rollout", "kv_cache") > 0
    assert part(dropped, "forward", "kv_cache") == 0


def test_smaller_microbatches_and_recomputation_take_less_memory(tiny_checkpoint):
    def backward(**changes):
        return part(make_plan(options(tiny_checkpoint, **changes)), "backward", "activations")

    assert backward(mini_bs=8) > backward(mini_bs=4) > backward(mini_bs=1)
    assert backward(activation_checkpointing=False) > backward(activation_checkpointing=True)


@pytest.mark.parametrize(("share", "recomputes"), [(1.1, False), (0.85, True)])
def test_by_default_the_plan_recomputes_layers_when_the_engine_does(share, recomputes, tmp_path, monkeypatch):
    checkpoint = save_tiny_checkpoint(tmp_path / "model", hidden=128, layers=4, heads=4)
    kept = make_plan(options(checkpoint, algo="sft", activation_checkpointing=False))
    loaded, moments = kept.phase("load").total, part(kept, "backward", "optimizer")
    free = int(share * 2 * (kept.phase("backward").total - moments - loaded))
    plan = make_plan(options(checkpoint, algo="sft"), available=loaded + int((free + moments) / 0.95))
    assert (part(plan, "backward", "activations") < part(kept, "backward", "activations")) is recomputes
    monkeypatch.setattr(step_module, "usable_bytes", lambda device: free)
    switched = []
    monkeypatch.setattr(step_module, "recompute_layers", lambda module, enabled, *_: switched.append(enabled))
    sizes = RunSizes(options(checkpoint, algo="sft"), CPU)
    lengths, _ = sizes.microbatch(sizes.longest_row(None))
    rows = [TrainSequence([False] * n, [5] * n, logprobs=[0.0] * n) for n in lengths]
    with contextlib.closing(Engine(str(checkpoint), EngineConfig())) as engine:
        engine.train(rows, sft_loss_fn, len(rows))
    assert switched == [True, False] if recomputes else [False]


def test_a_shape_is_made_once_and_a_plan_does_not_depend_on_those_before_it(tiny_checkpoint):
    """Advice and the tuner plan one model many times."""
    runs = [options(tiny_checkpoint, **more) for more in ({}, {"activation_checkpointing": False}, {"mini_bs": 1})]
    memory_plan._shape_of.cache_clear()
    together = [make_plan(run) for run in (*runs, *runs)]
    assert memory_plan._shape_of.cache_info().misses == 1
    assert together[:3] == together[3:]
    for run, plan in zip(runs[1:], together[1:], strict=False):
        memory_plan._shape_of.cache_clear()
        assert make_plan(run) == plan


def test_roles_are_counted_where_a_run_holds_them(tiny_checkpoint):
    def plan(**values):
        return make_plan(options(tiny_checkpoint, **values))

    def roles(phase="backward", **values):
        return part(plan(**values), phase, "roles")

    weights = part(plan(), "load", "weights")
    critic = load_value_model(str(tiny_checkpoint), LoadOptions(dtype=torch.float32)).module
    value = sum(t.untyped_storage().nbytes() for t in [*critic.parameters(), *critic.buffers()])
    assert roles(algo="ppo") == weights + value
    assert roles(algo="ppo", use_kl_loss=False) == value
    assert roles(algo="ppo", use_kl_loss=False, reward_ckpt=str(tiny_checkpoint)) == 2 * value
    assert (roles(), roles(kl_coef=0.1), roles(kl_reward_coef=0.1), roles(algo="dpo")) == (0, weights, weights, 0)
    other = {"algo": "dpo", "ref_ckpt": f"{tiny_checkpoint}/"}
    assert (roles(**other), roles("score", **other)) == (0, weights), "DPO's reference is gone before the first step"
    own = {"kl_coef": 0.1, "lora_rank": 4}
    assert roles(**own) == 0, "with its adapter off, the actor is its own reference"
    assert roles(**own, ref_ckpt=f"{tiny_checkpoint}/") == weights
    two_states = part(plan(algo="ppo"), "optimizer", "optimizer")
    assert two_states > 1.5 * part(plan(), "optimizer", "optimizer")


def test_advice_makes_a_run_fit(tiny_checkpoint):
    run = options(tiny_checkpoint, batch_size=32, n_samples=8, mini_bs=16, activation_checkpointing=False)
    plan = make_plan(run)
    tight = plan.peak.total - (plan.peak.total - 64 * MIB) // 2
    changes = advise(run, dataclasses.replace(plan, available=tight))
    assert changes
    words = " ".join(["--ckpt", str(tiny_checkpoint), *changes]).split()
    from areno.config.parser import parse_train

    parsed = parse_train(words)
    better = dataclasses.replace(run, **{name: getattr(parsed, name) for name in parsed.explicit})
    assert make_plan(better, tight).fits


def test_the_table_says_yes_or_no_and_what_to_do(tiny_checkpoint):
    run = options(tiny_checkpoint)
    assert "Fits: yes." in plan_text(run, make_plan(run))
    text = plan_text(run, make_plan(run, MIB))
    assert "Fits: no." in text
    assert "use a smaller model" in text
    crowded = options(tiny_checkpoint, batch_size=32, kv_cache_tokens=250)
    assert "some sequences may have to wait" in plan_text(crowded, make_plan(crowded))


def test_a_checkpoint_without_a_usable_configuration_is_a_usage_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))
    with pytest.raises(UsageError, match=r"--ckpt .* could not be loaded: .*no-such-family"):
        make_plan(options(tmp_path))


def test_this_machine_has_memory_available():
    free = available_bytes(CPU)
    assert 2**20 < free < 2**50
    assert default_kv_tokens(CPU, 1000) == pytest.approx(free * KV_SHARE / 1000, rel=0.5)


def test_a_cache_budget_is_never_too_small_to_start():
    assert default_kv_tokens(CPU, 2**60) == 1024


def test_a_peak_is_measured_only_within_its_block():
    return_freed_memory(CPU)  # memory that earlier tests freed would serve the block
    before = held_memory(CPU)
    begin_peak(CPU)
    torch.ones(64 * MIB // 4).sum()
    large = peak_since(CPU)
    return_freed_memory(CPU)
    begin_peak(CPU)
    torch.ones(4 * MIB // 4).sum()
    assert large >= before + 60 * MIB
    assert peak_since(CPU) < large - 40 * MIB


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_plan_command_needs_no_data_and_prints_every_phase(tiny_checkpoint, capsys):
    assert main(["plan", "--ckpt", str(tiny_checkpoint), "--algo", "ppo", "--device", "cpu", "--batch-size", "2"]) == 0
    text = capsys.readouterr().out
    for word in ("load", "rollout", "score", "forward", "backward", "optimizer", "KV cache", "Fits: yes."):
        assert word in text


def test_the_parts_of_a_json_plan_add_up(tiny_checkpoint, capsys):
    words = ["plan", "--ckpt", str(tiny_checkpoint), "--algo", "sft", "--device", "cpu", "--json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["phases"]) == ["load", "forward", "backward", "optimizer"]
    for parts in data["phases"].values():
        assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    assert data["peak"]["bytes"] == max(parts["total"] for parts in data["phases"].values())
    assert data["fits"]
    assert data["change"] == []


def test_a_run_that_does_not_fit_exits_with_1(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(memory_plan, "available_bytes", lambda device: 16 * MIB)  # stands in for a small machine
    words = ["plan", "--ckpt", str(tiny_checkpoint), "--device", "cpu", "--algo", "sft", "--max-new-tokens", "24"]
    assert main([*words, "--max-prompt-tokens", "40", "--batch-size", "2", "--mini-bs", "1"]) == 1
    assert "Fits: no." in capsys.readouterr().out


def test_a_plan_without_a_model_is_a_usage_error(capsys):
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("error: --ckpt is required")


def test_a_dry_run_prints_configuration_and_memory_and_writes_nothing(tmp_path, tiny_checkpoint):
    task = write_task(tmp_path / "task")
    before = sorted(tmp_path.rglob("*"))
    done = areno(*task_arguments("grpo", tiny_checkpoint, task, tmp_path / "run"), "--dry-run")
    assert done.returncode == 0, done.stderr
    title, _, rest = done.stdout.partition("\nResolved configuration\n----------------------\n")
    assert title.startswith("AReno training config\n")
    config, _, memory = rest.partition("\nMemory\n------\n")
    assert yaml.safe_load(config)["lr"] == 1e-3
    assert memory.startswith("Memory plan in MiB (0.0")
    assert "Fits: yes." in memory
    written = [path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(written) == before
