"""Further options of ``areno train`` in whole runs: restricted sampling with stop strings, and a custom algorithm."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from transformers import AutoTokenizer

from areno.cli.main import main
from tests.support.cli import areno, task_arguments, write_task
from tests.support.optimizer_states import contents

ALGORITHM = '''
"""REINFORCE with a length penalty of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from areno.config import AlgorithmSpec, option
from areno.loss_fns import reduces_over


@dataclass(kw_only=True)
class Options:
    sharpness: float = option(1.0, above=0, help="Scales every advantage.")


@reduces_over("token")
def reinforce(data_pack, logprobs, sharpness=1.0):
    mask = data_pack["packed_response_mask"]
    gain = sharpness * data_pack["packed_advantages"] * logprobs
    return -(gain * mask).sum() / mask.sum().clamp(min=1), {"sharpness": sharpness, "own_loss_calls": 1.0}


def make_loss(options):
    return functools.partial(reinforce, sharpness=options.extra["sharpness"])


reinforce_spec = AlgorithmSpec(
    "reinforce",
    "areno.api.trainers.policy_only:PolicyOnlyTrainer",
    reinforce,
    True,
    loss_fn_factory=make_loss,
    options=Options,
)
'''


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def samples(run_dir):
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def test_an_algorithm_in_a_file_trains_with_its_own_loss_and_option(tmp_path, tiny_checkpoint):
    task, run_dir = write_task(tmp_path / "task"), tmp_path / "run"
    (tmp_path / "own.py").write_text(ALGORITHM)
    arguments = task_arguments(f"{tmp_path / 'own.py'}:reinforce_spec", tiny_checkpoint, task, run_dir)
    done = areno(*arguments, "--sharpness", "2.5", "--max-steps", 3)
    assert done.returncode == 0, done.stderr
    for record in metrics(run_dir):
        assert record["train/sharpness"] == pytest.approx(2.5)
        assert record["train/own_loss_calls"] == pytest.approx(1.0)
        assert record["train/grad_norm"] > 0
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert stored["sharpness"] == 2.5
    assert "reinforce" in done.stdout
    assert main(["train", "--resume", str(run_dir), "--max-steps", "4"]) == 0
    assert [record["step"] for record in metrics(run_dir)] == [0, 1, 2, 3]


@pytest.fixture
def train(tmp_path, tiny_checkpoint, capsys):
    """Runs ``areno train`` in this process; returns the run directory."""

    def run(algo, *further):
        arguments = task_arguments(algo, tiny_checkpoint, write_task(tmp_path / "task"), tmp_path / "run")
        code = main([*map(str, arguments), "--reward-workers", "1", *map(str, further)])
        assert code == 0, capsys.readouterr().err
        return tmp_path / "run"

    return run


def test_restricted_sampling_and_stop_strings_apply_in_a_run(train, tiny_checkpoint):
    restricted = ("--temperature", 0.7, "--top-k", 5, "--top-p", 0.9, "--stop", "e", "--stop", "a")
    run_dir = train("gspo", *restricted, "--max-new-tokens", 40, "--max-steps", 3)
    for record in metrics(run_dir):
        # The log-probs are those of the scaled policy without top-k and top-p, so training can recompute them.
        assert record["train/logp_abs_diff_mean"] < 1e-5
        assert 0 < record["train/sampling_cut_mass"] < 1
    recorded = samples(run_dir)
    assert {sample["finish_reason"] for sample in recorded} == {"stop", "length"}
    assert not any(stop in sample["completion"] for sample in recorded for stop in "ea")
    assert AutoTokenizer.from_pretrained(tiny_checkpoint).eos_token not in "".join(s["completion"] for s in recorded)


def test_ignoring_eos_generates_to_the_limit(train):
    run_dir = train("grpo", "--ignore-eos", "--max-steps", 2)
    assert {sample["response_len"] for sample in samples(run_dir)} == {12}
    assert [record["train/truncated_ratio"] for record in metrics(run_dir)] == [1.0, 1.0]


def test_a_small_cache_and_few_running_sequences_do_not_change_results(train, tmp_path):
    whole = metrics(train("grpo", "--max-steps", 2, "--run-dir", tmp_path / "whole").parent / "whole")
    tight = ("--max-prompt-tokens", 30, "--kv-cache-tokens", 100, "--max-running-prompts", 3, "--drop-rollout-state")
    narrow = metrics(train("grpo", "--max-steps", 2, "--run-dir", tmp_path / "tight", *tight).parent / "tight")
    for key in ("rollout/rewards_mean", "train/response_len", "train/rollout_logprobs_mean", "train/grad_norm"):
        assert [record[key] for record in narrow] == pytest.approx([record[key] for record in whole], rel=1e-4)


def test_accumulation_takes_several_optimizer_steps_from_one_batch(train):
    run_dir = train("grpo", "--mini-bs", 4, "--gradient-accumulation-steps", 2, "--max-steps", 2)
    records = metrics(run_dir)
    # 24 rows in steps of 8: the second and third see a policy that has moved.
    assert all(record["train/ratio_std"] > 1e-4 for record in records)
    state = sorted((run_dir / "checkpoints").iterdir())[-1] / "trainer_state" / "optimizer"
    assert contents(state)["head"]["steps"] == 6


def test_a_tracking_service_gets_the_metrics_too(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    task = write_task(tmp_path / "task")
    words = task_arguments("sft", tiny_checkpoint, task, tmp_path / "run")
    done = areno(*words, "--max-steps", 2, "--track", "wandb", "--track-project", "sums")
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "run").rglob("run-*.wandb")
    assert kept.name == "run-sums_run_train.wandb"
    assert b"train/sft_loss" in kept.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--track", "wandbb"], r"--track wandbb is unknown.*did you mean wandb"),
        (["--track", "wandb"], r"--track wandb is not logged in.*WANDB_API_KEY"),
        (["--track-project", "x"], r"--track-project x has no effect without a tracking service"),
    ],
)
def test_tracking_services_are_checked_before_anything_is_loaded(
    words, message, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    task = write_task(tmp_path / "task")
    arguments = map(str, task_arguments("sft", tiny_checkpoint, task, tmp_path / "run"))
    assert main([*arguments, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.long
def test_a_resumed_run_keeps_its_tracking_service(tiny_checkpoint, tmp_path, monkeypatch):
    """Also if the evaluation of the step that it resumes from is reported again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    task = write_task(tmp_path / "task")
    words = task_arguments("sft", tiny_checkpoint, task, tmp_path / "run")
    words += ["--track", "wandb", "--eval-dataset-path", task["data.jsonl"], "--eval-interval", 1]
    assert areno(*words, "--max-steps", 1).returncode == 0
    (first,) = (tmp_path / "run").rglob("run-*.wandb")
    done = areno("train", "--resume", tmp_path / "run", "--max-steps", 3)
    assert done.returncode == 0, done.stderr
    (second,) = {*(tmp_path / "run").rglob("run-*.wandb")} - {first}
    assert b"train/sft_loss" in second.read_bytes()
