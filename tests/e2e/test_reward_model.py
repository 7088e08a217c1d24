"""Reward-model training through ``areno train --algo rm``: it learns, resumes bit for bit, and ``transformers`` reads it."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areno import ArenoConfig, Trainer, reward_model_loss_fn
from areno.training.objectives.base import RowBounds
from areno.training.objectives.pairs import build_preference_rows
from tests.support.cli import areno, kill, start, wait_for_text, without_times
from tests.support.preferences import (
    SUMS,
    accuracy,
    arguments,
    classifier_scores,
    folds,
    gsm8k_pairs,
    last_checkpoint,
    metrics,
    run,
    same_weights,
    save_gsm8k_model,
    standard_error,
    write_rows,
)

STEPS = 10
TINY = ("--batch-size", 6, "--mini-bs", 4, "--lr", "3e-3", "--max-new-tokens", 60, "--max-steps", STEPS)
LEARNING = ("--lr", "2e-3", "--adam-beta2", 0.99, "--batch-size", 100, "--mini-bs", 200, "--eval-interval", 1000)


@pytest.fixture
def pairs(tmp_path):
    """Files of training and held-out pairs."""
    return write_rows(tmp_path / "train.jsonl", SUMS[:40]), write_rows(tmp_path / "held.jsonl", SUMS[40:])


def learn(folder, train, held_out, *further):
    """Train on some pairs; return the margins of the others after comparing them with the run's metrics."""
    folder.mkdir(exist_ok=True)
    model = save_gsm8k_model(folder / "model", train, hidden=64)
    files = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in (("train", train), ("held", held_out))]
    log = run("rm", model, folder / "run", files[0], "--eval-dataset-path", files[1], *LEARNING, *further)
    assert "stage=rm_dataset_filter skipped_invalid_or_long=0" in log
    scores = classifier_scores(last_checkpoint(folder / "run"), held_out)
    margins = [chosen - rejected for chosen, rejected in scores]
    before, after = metrics(folder / "run", "eval")
    assert (before["eval/accuracy"], before["eval/margin"]) == (0.0, 0.0), "a new head scores everything 0"
    assert after["eval/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    assert after["eval/chosen_score"] == pytest.approx(sum(chosen for chosen, _ in scores) / len(margins), abs=1e-4)
    assert after["eval/accuracy"] == pytest.approx(accuracy(margins), abs=1.01 / len(margins))
    losses = -torch.nn.functional.logsigmoid(torch.tensor(margins, dtype=torch.float64))
    assert after["eval/loss"] == pytest.approx(float(losses.mean()), abs=1e-4)
    return margins


def test_a_reward_model_prefers_unseen_correct_solutions(gsm8k, tmp_path):
    """Half of the pairs are held out: accuracy is 0.64 with seed 0, and 0.58 with the halves swapped; guessing gives 0.5,
    with a standard error of 0.026."""
    train, held_out = folds(gsm8k_pairs(gsm8k, questions=False), 2)[0]
    margins = learn(tmp_path / "half", train, held_out, "--max-steps", 8)
    assert len(margins) == 366
    assert accuracy(margins) > 0.5 + 3 * standard_error(366)


@pytest.mark.long
def test_a_reward_model_learns_from_whole_problems_to_prefer_unseen_correct_solutions(gsm8k, tmp_path):
    """Accuracy is 0.61 with seed 0."""
    margins = [
        margin
        for index, (train, held_out) in enumerate(folds(gsm8k_pairs(gsm8k, questions=True), 4))
        for margin in learn(tmp_path / str(index), train, held_out, "--max-steps", 10)
    ]
    assert len(margins) == 731
    assert accuracy(margins) > 0.5 + 3 * standard_error(731)


@pytest.mark.long
def test_a_killed_and_resumed_run_is_bit_for_bit_identical(tiny_checkpoint, pairs, tmp_path):
    options = (*TINY, "--eval-dataset-path", pairs[1], "--eval-interval", 3, "--save-interval", 2)
    whole = areno(*arguments("rm", tiny_checkpoint, tmp_path / "whole", pairs[0], *options))
    assert whole.returncode == 0, whole.stderr
    process = start(*arguments("rm", tiny_checkpoint, tmp_path / "killed", pairs[0], *options))
    wait_for_text(process, f"step 5/{STEPS}")
    time.sleep(random.Random(0).random() * 0.05)
    assert kill(process) == -signal.SIGKILL
    process = start("train", "--resume", tmp_path / "killed")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    for kind in ("train", "eval"):
        first, second = (metrics(tmp_path / name, kind) for name in ("whole", "killed"))
        assert [without_times(m) for m in first] == [without_times(m) for m in second]


def test_the_microbatch_size_does_not_change_results(tiny_checkpoint, pairs, tmp_path):
    sizes = (2, 4, 16)
    for mini_bs in sizes:
        run("rm", tiny_checkpoint, tmp_path / str(mini_bs), pairs[0], *TINY, "--adam-eps", "1e-4", "--mini-bs", mini_bs)
    assert same_weights(tmp_path / "2", tmp_path / "4", 1e-4)
    assert same_weights(tmp_path / "2", tmp_path / "16", 1e-4)
    losses = [[m["train/loss"] for m in metrics(tmp_path / str(size), "train")] for size in sizes]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] == pytest.approx(losses[2], abs=1e-5)


@pytest.mark.parametrize(("mini_bs", "accumulation", "updates"), [(2, 1, 6), (2, 3, 2), (16, 1, 1)])
def test_accumulation_makes_updates_of_whole_pairs(mini_bs, accumulation, updates, tiny_checkpoint, pairs, tmp_path):
    """One step of the command against explicit SDK calls, one per update."""
    sizes = (*TINY, "--mini-bs", mini_bs, "--gradient-accumulation-steps", accumulation)
    run("rm", tiny_checkpoint, tmp_path / "run", pairs[0], *sizes, "--max-steps", 1, "--no-shuffle")
    optimizer = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "grad_clip_norm": 1.0}
    config = ArenoConfig(optimizer=optimizer, runtime={"trains": "reward"})
    with Trainer(1, str(tiny_checkpoint), custom_config=config) as trainer:
        trainer.init()
        limits = {"max_prompt_tokens": 1024, "max_new_tokens": 60, "eos_token_ids": trainer.backend.eos_ids}
        built, _ = build_preference_rows(SUMS[:6], trainer.get_tokenizer(), RowBounds(**limits))
        rows = [row for pair in built for row in pair]
        per_update = len(rows) // updates
        for begin in range(0, len(rows), per_update):
            trainer.train(rows[begin : begin + per_update], reward_model_loss_fn, mini_bs)
        (tmp_path / "sdk" / "checkpoints").mkdir(parents=True)
        trainer.save_checkpoint(str(tmp_path / "sdk" / "checkpoints" / "step_000001"))
    assert same_weights(tmp_path / "run", tmp_path / "sdk", 1e-5)


def test_the_statistics_log_lines_and_final_checkpoint_of_a_run(tiny_checkpoint, pairs, tmp_path):
    log = run("rm", tiny_checkpoint, tmp_path / "run", pairs[0], *TINY, "--max-steps", 2)
    assert "epoch=0 step=1 role=policy stage=train_start pairs=6" in log
    names = ["rm_loss", "rm_accuracy", "rm_margin", "rm_chosen_score", "rm_rejected_score", "grad_norm", "lr", "loss"]
    for record in metrics(tmp_path / "run", "train"):
        assert not [name for name in names if f"train/{name}" not in record]
    model, report = AutoModelForSequenceClassification.from_pretrained(
        last_checkpoint(tmp_path / "run"), output_loading_info=True
    )
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.score.weight.abs().sum() > 0
