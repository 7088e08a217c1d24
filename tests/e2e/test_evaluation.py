"""Evaluation in real runs: killed and resumed, stopped during an evaluation, and repeated by ``areno eval``."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from areno.cli.main import main
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.contents import read_state, write_state
from tests.support.cli import REWARD, areno, kill, start, task_arguments, wait_for_text, without_times, write_task

STEPS = 12


def arguments(algo, checkpoint, folder, run):
    """Arguments of a tiny run with held-out rows, and both kinds of checkpoints."""
    task = write_task(folder / "task")
    held_out = [
        {"prompt": f"What is {a} plus {a}?", "response": f"It is {2 * a}.", "held": True} for a in range(31, 38)
    ]
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    evaluation = ["--eval-dataset-path", folder / "held.jsonl", "--eval-interval", 2, "--keep-best"]
    if algo != "sft":
        evaluation += ["--eval-n-samples", 4, "--eval-temperature", 0.9]
    return [*task_arguments(algo, checkpoint, task, run), *evaluation]


def run_here(*command):
    """Run ``areno`` to its end in this process."""
    assert main([*map(str, command)]) == 0


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(run):
    return [record for record in records(run) if any(name.startswith("eval/") for name in record)]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("algo", ["sft", pytest.param("grpo", marks=pytest.mark.long)])
def test_a_killed_and_resumed_run_has_the_evaluations_and_best_of_an_uninterrupted_one(algo, tmp_path, tiny_checkpoint):
    further = ["--max-steps", STEPS, "--save-interval", 3, "--keep-checkpoints", 1, "--lr", "2e-2"]
    whole, run = tmp_path / "whole", tmp_path / "killed"
    done = areno(*arguments(algo, tiny_checkpoint, tmp_path, whole), *further)
    assert done.returncode == 0, done.stderr
    process = start(*arguments(algo, tiny_checkpoint, tmp_path, run), *further)
    rng = random.Random(algo)
    for stop in (3, 8):
        wait_for_text(process, f"step {stop}/{STEPS}")
        time.sleep(rng.random() * 0.15)
        assert kill(process) == -signal.SIGKILL
        process = start("train", "--resume", run)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert [record["step"] for record in evaluations(run)] == [0, 2, 4, 6, 8, 10, 12]
    assert list(map(without_times, records(run))) == list(map(without_times, records(whole)))
    a, b = CheckpointFolder(whole / "checkpoints"), CheckpointFolder(run / "checkpoints")
    assert (b.steps(), b.best_step()) == (a.steps(), a.best_step()) == ([STEPS], a.best_step())
    assert a.best_step() is not None
    assert_equal(weights(a.best), weights(b.best))
    assert_equal(weights(a.path(STEPS)), weights(b.path(STEPS)))
    summaries = [json.loads((path / "summary.json").read_text()) for path in (whole, run)]
    assert summaries[0]["best_evaluation"]["value"] == summaries[1]["best_evaluation"]["value"]


def test_a_finished_run_is_not_evaluated_again_and_keeps_its_best_when_extended(tmp_path, tiny_checkpoint, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    # The last checkpoint is written before the last evaluation, but must still include its result.
    base = arguments("sft", tiny_checkpoint, tmp_path, run)
    run_here(*base, "--eval-dataset-path", "held.jsonl", "--max-steps", 3, "--save-interval", 3)
    before, logged = records(run), (run / "log.txt").read_text().count(" eval={")
    assert logged == 3
    run_here("train", "--resume", run)
    assert (run / "log.txt").read_text().count(" eval={") == logged
    assert list(map(without_times, records(run))) == list(map(without_times, before))
    run_here("train", "--resume", run, "--max-steps", 5)
    assert [record["step"] for record in evaluations(run)] == [0, 2, 3, 4, 5]
    losses = {record["step"]: record["eval/loss"] for record in evaluations(run)}
    best = json.loads((run / "summary.json").read_text())["best_evaluation"]
    assert best["value"] == losses[best["step"]] == min(losses.values())


def test_a_run_whose_newest_checkpoint_is_the_best_one_resumes_from_it(tmp_path, tiny_checkpoint):
    run = tmp_path / "run"
    run_here(*arguments("sft", tiny_checkpoint, tmp_path, run), "--max-steps", 2)
    folder = CheckpointFolder(run / "checkpoints")
    trained = weights(folder.path(2))
    assert folder.best_step() == 2
    shutil.rmtree(folder.path(2))  # as if the run had been killed before it saved the last step
    run_here("train", "--resume", run)
    assert folder.steps() == [2]
    assert_equal(weights(folder.path(2)), trained)
    assert [record["step"] for record in records(run)] == [0, 0, 1, 2]
    shutil.rmtree(folder.path(2))
    run_here("train", "--resume", run, "--max-steps", 3)
    assert [record["step"] for record in records(run)] == [0, 0, 1, 2, 2, 3]


def test_a_resumed_run_keeps_no_more_checkpoints_than_requested(tmp_path, tiny_checkpoint):
    run = tmp_path / "run"
    run_here(*arguments("sft", tiny_checkpoint, tmp_path, run), "--max-steps", 2, "--keep-checkpoints", 1)
    folder = CheckpointFolder(run / "checkpoints")
    # As if the run had been killed between the save of the last checkpoint and the deletion of the one before.
    shutil.copytree(folder.path(2), folder.path(1))
    write_state(folder.path(1), read_state(folder.path(1)) | {"step": 1})
    assert folder.steps() == [1, 2]
    run_here("train", "--resume", run)
    assert folder.steps() == [2]


def test_changed_evaluation_options_reset_the_best(tmp_path, tiny_checkpoint):
    run = tmp_path / "run"
    run_here(*arguments("sft", tiny_checkpoint, tmp_path, run), "--max-steps", 2)
    run_here("train", "--resume", run, "--max-steps", 3, "--eval-max-rows", 1)
    assert "the best evaluation so far is discarded" in (run / "log.txt").read_text()
    # The model after two steps is evaluated again, on the new rows.
    assert [(record["step"], record["eval/num_sequences"]) for record in evaluations(run)][-3:] == [
        (2, 7),
        (2, 1),
        (3, 1),
    ]
    best = json.loads((run / "summary.json").read_text())["best_evaluation"]
    new = {record["step"]: record["eval/loss"] for record in evaluations(run)[-2:]}
    assert best["value"] == min(new.values())


SLOW = REWARD.replace(
    "    digits = [", '    if record.source_record.get("held"):\n        time.sleep(3)\n    digits = ['
)


@pytest.mark.parametrize("steps_before", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_signal_during_evaluation_ends_the_run_at_once_and_the_resumed_run_evaluates(
    steps_before, tmp_path, tiny_checkpoint
):
    run = tmp_path / "run"
    command = [*arguments("grpo", tiny_checkpoint, tmp_path, run), "--max-steps", 3, "--reward-workers", 1]
    if steps_before:
        command += ["--no-eval-before-train"]
    (tmp_path / "task" / "reward.py").write_text("import time\n" + SLOW)  # 28 answers take 84 s
    process = start(*command)
    if steps_before:
        wait_for_text(process, "step 2/3")
    else:
        wait_for_text(process, "Outputs")
        deadline = time.monotonic() + 60
        while not (run / "config.yaml").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    time.sleep(1.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert time.monotonic() - began < 30
    assert "Traceback" not in output
    assert not (run / "metrics.jsonl").exists() or evaluations(run) == []
    assert CheckpointFolder(run / "checkpoints").steps() == ([2] if steps_before else [])
    (tmp_path / "task" / "reward.py").write_text(REWARD)
    run_here("train", "--resume", run)
    assert [record["step"] for record in evaluations(run)] == ([2, 3] if steps_before else [0, 2, 3])


def test_areno_eval_gives_the_metrics_of_the_run(tmp_path, tiny_checkpoint):
    run = tmp_path / "run"
    run_here(*arguments("grpo", tiny_checkpoint, tmp_path, run), "--max-steps", 3, "--seed", 4, "--stop", "7")
    settings = ["--n-samples", 4, "--temperature", 0.9, "--max-new-tokens", 12, "--seed", 4, "--stop", "7"]
    data = ["--dataset-path", tmp_path / "held.jsonl", "--reward-fn-path", tmp_path / "task" / "reward.py"]
    measured = areno("eval", "--ckpt", run, *data, *settings, "--json", "--output", tmp_path / "answers.jsonl")
    assert measured.returncode == 0, measured.stderr
    report = json.loads(measured.stdout.splitlines()[-1])
    assert report["ckpt"] == str(run / "checkpoints" / "step_000003")
    last = {k.removeprefix("eval/"): v for k, v in evaluations(run)[-1].items() if k.startswith("eval/")}
    assert without_times(report["metrics"]) == without_times(last)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 28
    assert sum(answer["reward"] for answer in answers) / 28 == pytest.approx(last["rewards_mean"])


def test_a_run_that_gets_worse_stops_early_and_reports_its_best(tiny_checkpoint, tmp_path):
    task = write_task(tmp_path / "task")
    words = task_arguments("sft", tiny_checkpoint, task, tmp_path / "run")
    words += ["--eval-dataset-path", task["data.jsonl"], "--eval-interval", 1, "--keep-best", "--lr", 0.3]
    done = areno(*words, "--early-stop-patience", 3, "--no-shuffle")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    best = losses.index(min(losses))  # number of steps at the best evaluation
    assert len(losses) == best + 4 < 50
    assert "none of the last 3 evaluations had a new best result, so the run stops" in done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["best_evaluation"]["step"], summary["steps"]) == (best, best + 3)


def test_checkpoints_can_be_written_at_time_intervals(tiny_checkpoint, tmp_path):
    task = write_task(tmp_path / "task")
    words = task_arguments("sft", tiny_checkpoint, task, tmp_path / "run")
    done = areno(*words, "--max-steps", 3, "--save-interval-minutes", 1e-6)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step_000001", "step_000002", "step_000003"]
