"""A run that was killed and resumed ends where an uninterrupted one does, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cli import areno, kill, start, task_arguments, wait_for_text, without_times, write_task
from tests.support.examples import some_quick

STEPS = 14


def weights(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(whole: Path, resumed: Path) -> None:
    a, b = weights(whole), weights(resumed)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [m["step"] for m in metrics(resumed)] == list(range(STEPS))
    assert [without_times(m) for m in metrics(whole)] == [without_times(m) for m in metrics(resumed)]
    samples = [(p / "samples.jsonl") for p in (whole, resumed)]
    if samples[0].exists():
        assert samples[0].read_text() == samples[1].read_text()


@pytest.mark.parametrize("algo", some_quick(["sft", "gspo"], "gspo"))
def test_a_run_killed_at_random_moments_and_resumed_is_bit_for_bit_identical(algo, tmp_path, tiny_checkpoint):
    task = write_task(tmp_path / "task")
    common = ["--max-steps", STEPS, "--save-interval", 2, "--lr-decay-steps", 10, "--keep-checkpoints", 2]
    whole = areno(*task_arguments(algo, tiny_checkpoint, task, tmp_path / "whole"), *common)
    assert whole.returncode == 0, whole.stderr
    run = tmp_path / "killed"
    process = start(*task_arguments(algo, tiny_checkpoint, task, run), *common)
    rng = random.Random(algo)
    for stop in (3, 8):
        wait_for_text(process, f"step {stop}/{STEPS}")
        time.sleep(rng.random() * 0.15)
        assert kill(process) == -signal.SIGKILL
        process = start("train", "--resume", run)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert_same_run(tmp_path / "whole", run)


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stop_signal_saves_the_last_step_and_says_how_to_resume(signum, tmp_path, tiny_checkpoint):
    task, run = write_task(tmp_path / "task"), tmp_path / "run"
    process = start(
        *task_arguments("grpo", tiny_checkpoint, task, run), "--save-interval", 1000, "--max-steps", 500, "--ignore-eos"
    )
    wait_for_text(process, "step 4/")
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert f"areno train --resume {run}" in output
    assert "Traceback" not in output
    saved = sorted((run / "checkpoints").iterdir())
    assert len(saved) == 1
    done = json.loads((saved[0] / "trainer_state" / "state.json").read_text())["step"]
    assert done >= 4
    finished = areno("train", "--resume", run, "--max-steps", done + 2)
    assert finished.returncode == 0, finished.stderr
    assert [m["step"] for m in metrics(run)] == list(range(done + 2))


def test_resuming_at_an_epoch_boundary_starts_the_next_epoch(tmp_path, tiny_checkpoint):
    task, run = write_task(tmp_path / "task", rows=18), tmp_path / "run"
    arguments = task_arguments("sft", tiny_checkpoint, task, run)
    assert areno(*arguments, "--epochs", 1).returncode == 0
    again = areno("train", "--resume", run, "--epochs", 2)
    assert again.returncode == 0, again.stderr
    assert [m["step"] for m in metrics(run)] == list(range(6))
    assert "epoch=1 stage=epoch_start" in again.stderr
    assert "epoch=0 stage=epoch_start" not in again.stderr


def test_a_resume_that_fails_leaves_the_checkpoint_as_it_was(tmp_path, tiny_checkpoint):
    task, run = write_task(tmp_path / "task"), tmp_path / "run"
    assert areno(*task_arguments("sft", tiny_checkpoint, task, run), "--max-steps", 2).returncode == 0
    saved = run / "checkpoints" / "step_000002"
    files = [path for path in (saved / "trainer_state" / "optimizer").rglob("*") if path.is_file()]
    optimizer = max(files, key=lambda path: path.stat().st_size)
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    (saved / "trainer_state" / "manifest.json").unlink()  # so the damage is noticed only when the state is loaded
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    failed = areno("train", "--resume", run, "--max-steps", 4)
    assert failed.returncode == 1
    assert f"{optimizer.parent} cannot be used" in failed.stderr
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert [path.name for path in saved.parent.iterdir()] == ["step_000002"]


def test_resuming_with_an_option_that_changes_results_is_refused(tmp_path, tiny_checkpoint):
    task, run = write_task(tmp_path / "task"), tmp_path / "run"
    assert areno(*task_arguments("sft", tiny_checkpoint, task, run), "--max-steps", 2).returncode == 0
    refused = areno("train", "--resume", run, "--lr", "5e-4")
    assert refused.returncode == 2
    assert "--lr" in refused.stderr
    assert "0.001" in refused.stderr
    assert "Traceback" not in refused.stderr
