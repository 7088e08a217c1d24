"""Estimates for layouts, against real models, real schedules and the memory of processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from areno.cli.main import main
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.schedule import make_schedule
from areno.engine.plan.layout_estimates import ModelSizes, Training, layouts_of, rank_bytes, sent_bytes, waiting_passes
from areno.engine.plan.layout_trial import LayoutTrial, Measured, measure_layout
from tests.support.tiny import save_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSizes(32, 200_000_000, 0, 1_000_000_000, False, 4096, 4096, 1024, 128, 14336, 0, 0, 128_000)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_equal_those_of_the_model(family, tied, tmp_path):
    path = save_tiny_checkpoint(tmp_path / family, family, heads=4, hidden=64, layers=3, tie_word_embeddings=tied)
    sizes, module = ModelSizes.of(AutoConfig.from_pretrained(path)), AutoModelForCausalLM.from_pretrained(path)
    assert sizes.parameters == pytest.approx(sum(p.numel() for p in module.parameters()), abs=3)
    assert (sizes.per_token > 0) == ("moe" in family or "oss" in family)
    assert sizes.active < sizes.parameters if sizes.per_token else sizes.active == sizes.parameters


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_waiting_passes_match_the_schedule(stages, chunks):
    for microbatches in (stages, 4 * stages):
        for stage, actions in enumerate(make_schedule(stages, chunks, microbatches)):
            waiting = [sum(-1 if a.backward else 1 for a in actions[:end]) for end in range(len(actions) + 1)]
            layout = Layout(pp_size=stages, pp_chunks=chunks)
            assert waiting_passes(layout, stage, microbatches) == max(waiting)


def test_bytes_follow_the_documented_formulas():
    n, training = MODEL.parameters, Training(tokens=4096, microbatches=4)
    whole = rank_bytes(MODEL, Layout(8), training)
    assert (whole.weights, whole.moments, whole.gradients) == (2 * n + 4 * n // 8, n, 4 * n)
    sharded = rank_bytes(MODEL, Layout(8, fsdp=True), training)
    assert (sharded.weights, sharded.moments, sharded.gradients) == (4 * n // 8, n, 4 * n // 8)
    assert sharded.gathered == 6 * (2 * MODEL.layer + MODEL.root)
    assert rank_bytes(MODEL, Layout(8, fsdp=True), Training(4096, 4, moments=2)).moments == n // 4
    assert sent_bytes(MODEL, Layout(8), training)["data"] == 6 * n * 7 // 8
    ring = sent_bytes(MODEL, Layout(1, 2), training)["tensor"]
    assert ring == 4 * 32 * 6 * 2 * 4096 * 4096 * 2 // 2


def test_every_layout_uses_all_devices():
    for devices in (1, 2, 6, 8):
        found = list(layouts_of(devices, MODEL))
        assert found[0] == Layout(devices)
        assert all(layout.world_size == devices for layout in found)


def test_layouts_divide_the_key_heads_and_the_experts():
    model = replace(MODEL, keys=6 * 128, per_token=2, experts_of_layer=12)
    found = list(layouts_of(16, model, per_node=16))
    assert {layout.tp_size for layout in found} == {1, 2}
    assert {layout.ep_size for layout in found} == {1, 2, 4}


@pytest.mark.parametrize("devices", [8, 12])
def test_the_ranks_that_share_experts_divide_the_data_and_context_ranks(devices):
    model = replace(MODEL, per_token=2, experts_of_layer=64)
    found = list(layouts_of(devices, model))
    assert max(layout.ep_size for layout in found) == devices & -devices
    assert all(layout.dp_size * layout.cp_size % layout.ep_size == 0 for layout in found)


@pytest.mark.parametrize("family", ["gpt2", "gemma3n_text", "gemma4_text"])  # without or with several MLP or head sizes
def test_a_model_of_another_form_is_refused_by_name(family, tmp_path, capsys):
    path = str(tmp_path)
    CONFIG_MAPPING[family]().save_pretrained(path)
    code, text = fit(capsys, "--ckpt", path, "--devices", "2")
    assert code == 2
    assert f"--ckpt {path}: memory and speed of this architecture cannot be estimated" in text


def test_a_missing_model_is_not_called_a_model_of_another_form(tmp_path, capsys):
    code, text = fit(capsys, "--ckpt", str(tmp_path / "missing"), "--devices", "2")
    assert code == 2
    assert "architecture" not in text


def test_context_ranks_beyond_the_key_heads_receive_repeated_heads():
    """Bytes per token and layer of the two exchanges of queries, keys, values and outputs, in forward and in backward."""
    training = Training(tokens=4096, microbatches=1)
    for ranks, key_heads in ((4, 8), (8, 8), (16, 16)):
        sent = sent_bytes(MODEL, Layout(1, fsdp=True, cp_size=ranks), training)["context"]
        width = 2 * 4096 + 2 * key_heads * 128
        again = 1 if training.recomputes else 0
        assert sent == (2 + again) * 32 * (4096 // ranks) * width * 2 * (ranks - 1) // ranks


def fit(capsys, *words: str) -> tuple[int, str]:
    code = main(["plan", "--fit", *words])
    captured = capsys.readouterr()
    return code, captured.out or captured.err


def test_the_command_proposes_what_fits(tmp_path, capsys):
    path = str(save_tiny_checkpoint(tmp_path / "moe", "qwen3_moe", heads=4, hidden=64))
    code, text = fit(capsys, "--ckpt", path, "--devices", "4", "--device-memory", "1", "--json")
    entries = json.loads(text)
    assert code == 0
    assert entries == sorted(entries, key=lambda entry: entry["seconds"])
    assert all(entry["bytes"] <= 0.9 * 2**30 for entry in entries)
    code, text = fit(capsys, "--ckpt", path, "--devices", "4")
    assert code == 0
    assert "megatron:d4" in text
    code, text = fit(capsys, "--ckpt", path, "--devices", "2", "--device-memory", "0.001")
    assert code == 1
    assert "no layout fits; use more devices" in text
    for option, value in (("devices", "0"), ("device-memory", "nan"), ("device-memory", "inf"), ("tflops", "inf")):
        code, text = fit(capsys, "--ckpt", path, "--devices", "1", f"--{option}", value)
        assert code == 2
        assert f"--{option} {value}: the value must be a finite number above 0" in text


def test_proposals_are_tried_on_this_machine(tmp_path, capsys):
    path = str(save_tiny_checkpoint(tmp_path / "model", heads=4, hidden=64))
    words = ("--ckpt", path, "--devices", "2", "--tokens", "64", "--microbatches", "2", "--try", "1")
    code, text = fit(capsys, *words)
    assert code == 2
    assert "--try with --dtype bfloat16: on a CPU, only float32 can be measured; use --dtype float32" in text
    code, text = fit(capsys, *words, "--dtype", "float32", "--json")
    assert code == 0
    [entry] = json.loads(text)
    assert 0 < entry["measured"]["seconds"] < 60
    assert entry["measured"]["bytes"] > entry["bytes"]  # measured for the whole process


def test_a_model_with_a_short_context_is_tried_with_shorter_rows(tmp_path, capsys):
    path = str(save_tiny_checkpoint(tmp_path / "model", heads=4, hidden=64, max_position_embeddings=48))
    words = ("--devices", "1", "--tokens", "100", "--microbatches", "2", "--try", "1", "--dtype", "float32", "--json")
    code, text = fit(capsys, "--ckpt", path, *words)
    assert code == 0
    [entry] = json.loads(text)
    assert entry["measured"]["seconds"] > 0


@pytest.mark.long
def test_a_trial_makes_passes_of_the_estimated_number_of_tokens(tmp_path):
    """Peak memory grows as estimated beyond the number of tokens to which a training run limits a pass on a CPU."""
    path = str(save_tiny_checkpoint(tmp_path / "model", heads=4, hidden=64, intermediate_size=2048))
    sizes, found = ModelSizes.of(AutoConfig.from_pretrained(path)), []
    for tokens in (2048, 4 * 2048):
        trial = LayoutTrial(path, tokens, 1, torch.device("cpu"), torch.float32, steps=1)
        planned = rank_bytes(sizes, Layout(), Training(tokens, compute=4)).total
        found.append((measure_layout(Layout(), trial).held, planned))
    grown, planned = (after - before for before, after in zip(*found, strict=True))
    assert 0.7 < grown / planned < 1.3


def test_a_layout_that_runs_out_of_memory_leaves_the_results_of_the_others(tmp_path, capsys, monkeypatch):
    """The lack of memory is simulated, because a limit for one layout would also limit the others."""
    path = str(save_tiny_checkpoint(tmp_path / "model", heads=4, hidden=64))
    words = ("--ckpt", path, "--devices", "2", "--tokens", "64", "--microbatches", "2", "--try", "2")
    words = (*words, "--dtype", "float32")
    tried = []

    def measure(layout, _trial):
        tried.append(layout)
        if len(tried) in lacking:
            raise torch.OutOfMemoryError("out of memory")
        return Measured(0.5, 0, 2**30)

    monkeypatch.setattr("areno.engine.plan.fit.measure_layout", measure)
    lacking = (1,)
    assert main(["plan", "--fit", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("failed: out of memory") == 1
    rows = [line.split() for line in shown.out.splitlines() if re.match(r"(fsdp|megatron|archon):", line)]
    assert [row[5:] for row in rows] == [["0.50", "1.00"], ["failed"]]
    tried, lacking = [], (1, 2)
    code, text = fit(capsys, *words)
    assert code == 1
    assert "error: out of memory" in text


@pytest.mark.long
def test_planned_memory_is_what_the_fullest_rank_holds():
    command = [sys.executable, "benchmarks/layouts.py", "--rows", "8", "--microbatches", "4", "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2700, check=True)
    found = json.loads(done.stdout.splitlines()[-1])["layouts"]
    assert len(found) == 14
    shares = {name: round(entry["held"] / entry["planned"], 3) for name, entry in found.items()}
    outside = {name: share for name, share in shares.items() if not 0.9 <= share <= 1.1}
    assert len(outside) <= 2, outside  # what the system counts as resident varies by a few per cent
    assert all(0.8 <= share <= 1.2 for share in outside.values()), outside
