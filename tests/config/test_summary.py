import json
from dataclasses import replace

import pytest
import torch

from areno.config import get_algorithm, packages
from areno.config.machine import rollout_gpu_problem, tensor_parallel_problem, with_layout
from areno.config.parser import parse_train
from areno.config.paths import base_of
from areno.config.prepare import prepare_plan, prepare_run
from areno.config.resume import apply_resume
from areno.config.summary import format_summary
from areno.errors import UsageError
from areno.gpus import visible_gpus
from tests.config.experiment.samples import refused
from tests.config.workspace import GSPO, SFT, stored_run


def summary(argv, width=100):
    options = apply_resume(parse_train([*argv, "--run-dir", "r"]))
    return format_summary(options, get_algorithm(options.algo), width=width)


def rows(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  ") and len(line.split()) > 1)


def test_sections_are_in_order():
    lines = summary(GSPO).splitlines()
    titles = ["Algorithm", "Inputs", "Runtime", "Rollout", "Training", "Outputs"]
    assert lines[0] == "AReno training config"
    assert [line for line in lines if line in titles] == titles
    assert all(lines[lines.index(title) + 1] == "-" * len(title) for title in titles)


def test_values_and_placeholders_are_shown():
    shown = rows(summary([*GSPO, "--stop", "END"]))
    assert shown["name"] == "gspo"
    assert shown["default_loss"] == "gspo_loss_fn"
    assert shown["requires_rollout"] == "yes"
    assert shown["dataset_loader"] == "none"
    assert shown["max_context_len"] == "model limit"
    assert shown["thinking"] == "tokenizer default"
    assert shown["max_running_prompts"] == "256"
    assert shown["sampling"] == "temperature=1.0 top_k=off top_p=1.0 stop='END'"
    assert shown["save_path"] == "r/checkpoints"
    assert shown["metrics_log_dir"] == "r/events"


def test_options_that_change_how_a_step_runs_are_shown():
    changed = rows(summary([*GSPO, "--adam-8bit", "--eager-decode", "--drop-rollout-state"], 200))
    plain = rows(summary(GSPO, 200))
    assert {name for name in plain if plain[name] != changed[name]} == {"optimizer", "decode", "rollout_state"}
    assert changed["optimizer"].startswith("8-bit AdamW lr=")
    assert (changed["decode"], changed["rollout_state"]) == ("eager", "dropped after each rollout")


def test_options_that_an_algorithm_without_rollout_does_not_use_are_na():
    shown = rows(summary(SFT))
    assert {shown[name] for name in ("n_samples", "sampling", "reward_fn", "agent_fn", "max_running_prompts")} == {
        "n/a"
    }
    assert shown["requires_rollout"] == "no"


def test_greedy_replaces_the_sampling_values():
    assert rows(summary([*GSPO, "--greedy"]))["sampling"] == "greedy"


@pytest.mark.parametrize("width", [60, 120])
def test_long_values_wrap_at_the_width_but_words_stay_whole(width):
    text = summary(GSPO, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "weight_decay=0.01" in text
    long_path = "folder/" * 20 + "x"
    assert long_path in summary(["--ckpt", long_path, "--dataset-path", "d"], width)


LAYOUTS = {
    "no GPU": (0, [], ("cpu", "float32", 1, 1)),
    "one": (1, [], ("cuda", "bfloat16", 1, 1)),
    "six": (6, [], ("cuda", "bfloat16", 6, 1)),
    "eight": (8, [], ("cuda", "bfloat16", 8, 4)),
    "given": (8, ["--world-size", "2", "--dtype", "float32"], ("cuda", "float32", 2, 1)),
    "half given": (8, ["--world-size", "8"], ("cuda", "bfloat16", 8, 4)),
    "tp given": (8, ["--tp-size", "2"], ("cuda", "bfloat16", 8, 2)),
    "the CPU of a node": (8, ["--device", "cpu"], ("cpu", "float32", 1, 1)),
    "one of eight": (8, ["--device", "cuda:3"], ("cuda:3", "bfloat16", 1, 1)),
    "rollout beside": (6, ["--rollout", "async"], ("cuda", "bfloat16", 5, 1)),
    "rollout on two": (8, ["--rollout", "async", "--rollout-replicas", "2"], ("cuda", "bfloat16", 6, 1)),
    "spread over replicas": (8, ["--fsdp"], ("cuda", "bfloat16", 8, 1)),
}


@pytest.mark.parametrize(("gpus", "argv", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_unset_options_are_shown_as_resolved_for_the_machine(workspace, monkeypatch, gpus, argv, expected):
    devices(monkeypatch, gpus)
    options = prepare_plan([*GSPO, *argv])
    shown = rows(format_summary(options, get_algorithm(options.algo), gpus=visible_gpus()))
    device, dtype, world, tp = expected
    assert (shown["device"], shown["dtype"], shown["world_size"], shown["tp_size"]) == (
        device,
        dtype,
        f"{world}",
        f"{tp}",
    )
    assert shown["dp_size"] == str(world // tp)


def test_a_model_that_cannot_be_sharded_across_four_devices_is_replicated(workspace, monkeypatch):
    devices(monkeypatch, 8)
    (workspace / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 14, "num_key_value_heads": 2}))
    options = prepare_plan(GSPO)
    assert (options.world_size, options.tp_size) == (8, 1)


@pytest.mark.parametrize(
    ("kind", "text", "size"), [("llama", None, 4), ("gpt2", None, 1), ("unheard_of", None, 1), ("llama", 3, 4)]
)
def test_a_model_without_a_tensor_parallel_plan_is_replicated(workspace, monkeypatch, kind, text, size):
    devices(monkeypatch, 8)
    config = {"model_type": kind, "num_attention_heads": 8, "num_key_value_heads": 4, "text_config": text}
    (workspace / "model" / "config.json").write_text(json.dumps(config))
    assert prepare_plan(GSPO).tp_size == size


@pytest.mark.parametrize(("heads", "size"), [(14, 1), (16, 4)])
def test_the_heads_of_a_model_in_the_hub_cache_determine_the_default(tmp_path, monkeypatch, heads, size):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": heads}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = replace(parse_train(GSPO), ckpt="some/model")
    assert with_layout(options, 8).tp_size == size


def test_a_resumed_run_keeps_its_layout(workspace, monkeypatch):
    devices(monkeypatch, 8)
    stored_run(workspace / "runs" / "old", "algo: gspo\nckpt: model\nworld_size: 2\ntp_size: 2\n", step=1)
    options = prepare_plan(["--resume", "runs/old"])
    assert (options.world_size, options.tp_size) == (2, 2)


def devices(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_rollout_processes_need_their_own_gpus(workspace, monkeypatch):
    devices(monkeypatch, 4)
    prepare_run([*GSPO, "--rollout", "async", "--world-size", "2", "--rollout-replicas", "2"])
    with pytest.raises(
        UsageError, match=r"training needs 2 GPUs \(--world-size\), .* rollout needs 3 more, but .* has 4 GPUs;"
    ):
        prepare_run([*GSPO, "--rollout", "async", "--world-size", "2", "--rollout-replicas", "3"])


@pytest.mark.parametrize(("gpus", "size", "world"), [(3, 2, 2), (7, 3, 6), (4, 4, 4), (3, 1, 3)])
@pytest.mark.usefixtures("workspace")
def test_training_gets_as_many_gpus_as_the_tensor_parallel_size_divides(monkeypatch, gpus, size, world):
    devices(monkeypatch, gpus)
    assert prepare_plan([*GSPO, "--tp-size", str(size)]).world_size == world


@pytest.mark.parametrize(
    ("gpus", "words", "world", "tp"),
    [
        (16, ["--rollout-replicas", "8"], 8, 1),
        (9, [], 8, 1),
        (16, ["--rollout-replicas", "2", "--world-size", "8"], 8, 4),
        (15, ["--rollout-replicas", "2", "--world-size", "8"], 8, 1),
        (9, ["--rollout-replicas", "2", "--rollout-backend", "vllm", "--tp-size", "2"], 4, 2),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_training_and_rollout_fit_on_the_gpus_by_default(monkeypatch, gpus, words, world, tp):
    devices(monkeypatch, gpus)
    options = parse_train([*GSPO, "--rollout", "async", *words])
    options = with_layout(options, gpus)
    assert (options.world_size, options.tp_size) == (world, tp)
    assert rollout_gpu_problem(options, gpus) == ""


@pytest.mark.parametrize(
    ("version", "tensor", "fsdp"),
    [
        ("5.20.2", True, True),
        ("5.21.0", False, True),
        ("5.23.0rc1", False, False),
        ("5.22.0.dev0", False, True),
        ("6.0", False, False),
    ],
)
def test_tensor_parallelism_names_the_transformers_that_it_needs(monkeypatch, version, tensor, fsdp):
    monkeypatch.setattr(packages, "version", lambda _: version)
    assert bool(tensor_parallel_problem()) == tensor
    assert bool(problem := tensor_parallel_problem(fsdp=True)) == fsdp
    assert not fsdp or problem.endswith(
        f"needs transformers 5.23 or newer, but {version} is installed; upgrade transformers"
    )


def test_an_old_transformers_is_reported_by_every_front_end(monkeypatch, workspace):
    """Fakes the installed version, since only one can be installed at once."""
    monkeypatch.setattr(packages, "version", lambda _: "5.17.0")
    arguments = [*GSPO, "--device", "cpu", "--world-size", "2", "--tp-size", "2"]
    with pytest.raises(
        UsageError, match=r"--tp-size 2: tensor parallelism needs transformers 5\.21 or newer, but 5\.17\.0"
    ):
        prepare_plan(arguments)
    assert "actor.backend fsdp:t2: tensor parallelism needs transformers 5.21" in refused({"actor.backend": "fsdp:t2"})
    (workspace / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"model\.gguf: reading GGUF needs transformers 5\.18"):
        base_of("model.gguf")


def test_a_node_gets_no_tensor_parallelism_by_default_that_transformers_cannot_do(monkeypatch, workspace):
    monkeypatch.setattr(packages, "version", lambda _: "5.17.0")
    devices(monkeypatch, 8)
    assert prepare_plan(GSPO).tp_size == 1
