"""DPO through ``areno train``: it learns, resumes bit for bit, keeps pairs together, and scores its reference once."""

from __future__ import annotations

import random
import shutil
import signal
import time
from functools import partial

import pytest

from areno import ArenoConfig, ModelRole, Trainer, dpo_loss_fn
from areno.api.trainers.supervised import DPODatasetTrainer
from areno.cli.main import main
from areno.config.all_train_options import TrainOptions
from areno.errors import EngineError
from areno.training.objectives.base import RowBounds
from areno.training.objectives.pairs import build_preference_rows
from tests.support.cli import areno, kill, start, wait_for_text, without_times
from tests.support.preferences import (
    SUMS,
    accuracy,
    answer_logprobs,
    arguments,
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
from tests.support.tiny import save_tiny_checkpoint

STEPS = 10
TINY = ("--batch-size", 6, "--mini-bs", 4, "--lr", "3e-3", "--max-new-tokens", 60, "--max-steps", STEPS)
LEARNING = ("--batch-size", 32, "--mini-bs", 64, "--eval-interval", 1000)
READ, SCORED, LOADED = "are read from", "role=ref stage=logprob_score_start", "role=ref stage=init_start"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pairs(tmp_path):
    """Files of training and held-out pairs."""
    return write_rows(tmp_path / "train.jsonl", SUMS[:40]), write_rows(tmp_path / "held.jsonl", SUMS[40:])


def margins(policy, reference, rows, beta=0.1):
    """Implicit reward of the chosen answer minus that of the rejected one, computed with ``transformers``."""
    scored = zip(answer_logprobs(policy, rows), answer_logprobs(reference, rows), strict=True)
    return [
        beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        for (chosen, rejected), (ref_chosen, ref_rejected) in scored
    ]


def learn(folder, train, held_out, *further, **sizes):
    """Train on some pairs; return the margins of the others after comparing them with the run's metrics."""
    folder.mkdir(exist_ok=True)
    model = save_gsm8k_model(folder / "model", train, **sizes)
    files = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in (("train", train), ("held", held_out))]
    log = run("dpo", model, folder / "run", files[0], "--eval-dataset-path", files[1], *LEARNING, *further)
    assert "stage=dpo_dataset_filter skipped_invalid_or_long=0" in log
    differences = margins(last_checkpoint(folder / "run"), model, held_out)
    before, after = metrics(folder / "run", "eval")
    # Policy and reference have the same weights, but the reference scores 8 rows at a time and the policy 64: products of
    # different shapes may round differently. `eval/accuracy` would then count the signs of rounding errors.
    for name in ("margin", "chosen_reward", "rejected_reward"):
        assert before[f"eval/{name}"] == pytest.approx(0.0, abs=1e-7), name
    assert before["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert after["eval/margin"] == pytest.approx(sum(differences) / len(differences), abs=1e-4)
    assert after["eval/accuracy"] == pytest.approx(accuracy(differences), abs=1.01 / len(differences))
    return differences


def test_dpo_learns_to_prefer_unseen_correct_solutions(gsm8k, tmp_path):
    """Half of the pairs are held out: accuracy is 0.63 with seed 0; guessing gives 0.5, with a standard error of 0.026."""
    train, held_out = folds(gsm8k_pairs(gsm8k, questions=False), 2)[0]
    differences = learn(tmp_path / "half", train, held_out, "--lr", "1e-2", "--max-steps", 12)
    assert len(differences) == 366
    assert accuracy(differences) > 0.5 + 4 * standard_error(366)


@pytest.mark.long
def test_dpo_learns_from_whole_problems_to_prefer_unseen_correct_solutions(gsm8k, tmp_path):
    """Accuracy is 0.63 with seed 0."""
    differences = [
        margin
        for index, (train, held_out) in enumerate(folds(gsm8k_pairs(gsm8k, questions=True), 4))
        for margin in learn(tmp_path / str(index), train, held_out, "--lr", "5e-3", "--max-steps", 18, hidden=64)
    ]
    assert len(differences) == 731
    assert accuracy(differences) > 0.5 + 4 * standard_error(731)


def test_a_second_run_reads_the_reference_from_disk_and_ends_with_the_same_weights(tiny_checkpoint, pairs, tmp_path):
    options = (pairs[0], "--eval-dataset-path", pairs[1], *TINY)
    first = run("dpo", tiny_checkpoint, tmp_path / "first", *options)
    second = run("dpo", tiny_checkpoint, tmp_path / "second", *options)
    assert first.count(SCORED) == 2
    assert f"{SCORED} rows=80" in first
    assert f"{SCORED} rows=48" in first
    assert READ not in first
    assert SCORED not in second
    assert second.count(READ) == 2
    assert LOADED not in first + second, "the policy itself was the reference"
    assert same_weights(tmp_path / "first", tmp_path / "second")
    seconds = [record["train/ref_logprob_forward_time_s"] for record in metrics(tmp_path / "first", "train")]
    assert seconds[0] > 0
    assert seconds[1:] == [0.0] * (STEPS - 1)


def test_other_data_or_weights_are_scored_again(tiny_checkpoint, pairs, tmp_path):
    options = (*TINY, "--max-steps", 1)
    run("dpo", tiny_checkpoint, tmp_path / "first", pairs[0], *options)
    shorter = write_rows(tmp_path / "shorter.jsonl", SUMS[:39])
    assert SCORED in run("dpo", tiny_checkpoint, tmp_path / "data", shorter, *options)
    other = save_tiny_checkpoint(tmp_path / "other", seed=1)
    assert SCORED in run("dpo", other, tmp_path / "weights", pairs[0], *options)
    assert len(list((tmp_path / "cache" / "ref_logprobs").iterdir())) == 3


def test_a_damaged_file_is_scored_again_with_a_warning(tiny_checkpoint, pairs, tmp_path, cache):
    options = (pairs[0], *TINY, "--max-steps", 2)
    run("dpo", tiny_checkpoint, tmp_path / "first", *options)
    (kept,) = (cache / "ref_logprobs").iterdir()
    kept.write_bytes(kept.read_bytes()[:-5])
    log = run("dpo", tiny_checkpoint, tmp_path / "second", *options)
    assert log.count("is damaged") == 1
    assert SCORED in log
    assert READ in run("dpo", tiny_checkpoint, tmp_path / "third", *options)
    assert same_weights(tmp_path / "first", tmp_path / "third")


def test_a_separate_reference_is_loaded_scored_and_dropped_once(tiny_checkpoint, pairs, tmp_path):
    reference = save_tiny_checkpoint(tmp_path / "reference", seed=7)
    options = (pairs[0], "--ref-ckpt", reference, "--eval-dataset-path", pairs[1], *TINY, "--max-steps", 2)
    first = run("dpo", tiny_checkpoint, tmp_path / "first", *options)
    assert first.count(f"{LOADED} trainable=False path={reference}") == 1
    assert first.count("role=ref stage=init_end") == 1
    second = run("dpo", tiny_checkpoint, tmp_path / "second", *options)
    assert LOADED not in second
    assert same_weights(tmp_path / "first", tmp_path / "second")
    before = metrics(tmp_path / "first", "eval")[0]
    expected = margins(tiny_checkpoint, reference, SUMS[40:])
    assert before["eval/margin"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert before["eval/accuracy"] == pytest.approx(accuracy(expected))


def test_the_reference_is_freed_after_scoring(tiny_checkpoint, tmp_path):
    reference = save_tiny_checkpoint(tmp_path / "reference", seed=7)
    options = TrainOptions(
        algo="dpo",
        ckpt=str(tiny_checkpoint),
        ref_ckpt=str(reference),
        dataset_path="rows",
        run_dir=str(tmp_path / "run"),
    )
    with Trainer(1, str(tiny_checkpoint)) as trainer:
        trainer.init()
        loop = DPODatasetTrainer(options, instance=trainer, dataset=SUMS, reward_fn=None, loss_fn=dpo_loss_fn)
        loop.prepare()
        rows, _ = next(loop.batches(range(loop.row_count()), 0))
        trainer.ensure_roles({"again": ModelRole("again", str(reference), trainable=False)})
        expected = trainer.score_logprobs("again", [row.tokens for row in rows])
        for row, values in zip(rows, expected, strict=True):
            masked = [value if trained else 0.0 for value, trained in zip(values, row.trainable(), strict=True)]
            assert row.ref_logprobs == pytest.approx(masked, abs=1e-5)
        with pytest.raises(EngineError, match="ref"):
            trainer.score_logprobs("ref", [rows[0].tokens])
        with pytest.raises(EngineError, match="eval_rows"):
            loop.evaluate(SUMS)


@pytest.mark.long
def test_a_killed_and_resumed_run_is_bit_for_bit_identical_and_loads_no_reference(tiny_checkpoint, pairs, tmp_path):
    options = (*TINY, "--eval-dataset-path", pairs[1], "--eval-interval", 3, "--save-interval", 2)
    whole = areno(*arguments("dpo", tiny_checkpoint, tmp_path / "whole", pairs[0], *options))
    assert whole.returncode == 0, whole.stderr
    shutil.rmtree(tmp_path / "cache")
    killed = tmp_path / "killed"
    process = start(*arguments("dpo", tiny_checkpoint, killed, pairs[0], *options))
    wait_for_text(process, f"step 5/{STEPS}")
    time.sleep(random.Random(0).random() * 0.05)
    assert kill(process) == -signal.SIGKILL
    process = start("train", "--resume", killed)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert READ in output
    assert SCORED not in output
    assert LOADED not in output
    assert same_weights(tmp_path / "whole", killed)
    for kind in ("train", "eval"):
        whole, resumed = (metrics(folder, kind) for folder in (tmp_path / "whole", killed))
        assert [without_times(m) for m in whole] == [without_times(m) for m in resumed]


def test_a_stop_during_reference_scoring_ends_the_run_at_once_without_partial_files(tiny_checkpoint, tmp_path, cache):
    long = [row | {"chosen": row["chosen"] * 20, "rejected": row["rejected"] * 30} for row in SUMS]
    many = write_rows(
        tmp_path / "many.jsonl", [row | {"prompt": f"{row['prompt']} {i}"} for i in range(60) for row in long]
    )
    command = arguments("dpo", tiny_checkpoint, tmp_path / "run", many, *TINY, "--max-new-tokens", 1000)
    process = start(*command)
    wait_for_text(process, SCORED)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "logprob_score_end" not in output
    assert "Traceback" not in output
    assert not [path for path in cache.rglob("*") if "kernels" not in path.parts]


def test_a_resumed_run_without_the_file_scores_with_the_initial_weights(tiny_checkpoint, pairs, tmp_path):
    run("dpo", tiny_checkpoint, tmp_path / "whole", pairs[0], *TINY)
    run("dpo", tiny_checkpoint, tmp_path / "parted", pairs[0], *TINY, "--max-steps", 4)
    shutil.rmtree(tmp_path / "cache")
    assert main(["train", "--resume", str(tmp_path / "parted"), "--max-steps", str(STEPS)]) == 0
    log = (tmp_path / "parted" / "log.txt").read_text().rpartition("resumed from")[2]
    assert f"{LOADED} trainable=False path={tiny_checkpoint}" in log
    assert SCORED in log
    assert same_weights(tmp_path / "whole", tmp_path / "parted")


def test_the_microbatch_size_does_not_change_results(tiny_checkpoint, pairs, tmp_path):
    for mini_bs in (2, 4, 16):
        run(
            "dpo", tiny_checkpoint, tmp_path / str(mini_bs), pairs[0], *TINY, "--adam-eps", "1e-4", "--mini-bs", mini_bs
        )
    assert same_weights(tmp_path / "2", tmp_path / "4", 1e-4)
    assert same_weights(tmp_path / "2", tmp_path / "16", 1e-4)
    losses = [[m["train/loss"] for m in metrics(tmp_path / name, "train")] for name in ("2", "4", "16")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] == pytest.approx(losses[2], abs=1e-5)


@pytest.mark.parametrize(("mini_bs", "accumulation", "updates"), [(2, 1, 6), (4, 1, 3), (2, 3, 2), (16, 1, 1)])
def test_accumulation_makes_updates_of_whole_pairs(mini_bs, accumulation, updates, tiny_checkpoint, pairs, tmp_path):
    """One step of the command against explicit SDK calls, one per update."""
    sizes = (*TINY, "--mini-bs", mini_bs, "--gradient-accumulation-steps", accumulation)
    run("dpo", tiny_checkpoint, tmp_path / "run", pairs[0], *sizes, "--max-steps", 1, "--no-shuffle")
    optimizer = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "grad_clip_norm": 1.0}
    with Trainer(1, str(tiny_checkpoint), custom_config=ArenoConfig(optimizer=optimizer)) as trainer:
        trainer.init()
        limits = {"max_prompt_tokens": 1024, "max_new_tokens": 60, "eos_token_ids": trainer.backend.eos_ids}
        built, _ = build_preference_rows(SUMS[:6], trainer.get_tokenizer(), RowBounds(**limits))
        rows = [row for pair in built for row in pair]
        for row, values in zip(rows, trainer.score_logprobs("actor", [r.tokens for r in rows]), strict=True):
            row.ref_logprobs = values
        per_update = len(rows) // updates
        for begin in range(0, len(rows), per_update):
            trainer.train(rows[begin : begin + per_update], partial(dpo_loss_fn, beta=0.1), mini_bs)
        (tmp_path / "sdk" / "checkpoints").mkdir(parents=True)
        trainer.save_checkpoint(str(tmp_path / "sdk" / "checkpoints" / "step_000001"))
    assert same_weights(tmp_path / "run", tmp_path / "sdk", 1e-5)


def test_the_statistics_and_log_lines_of_a_step(tiny_checkpoint, pairs, tmp_path):
    log = run("dpo", tiny_checkpoint, tmp_path / "run", pairs[0], *TINY, "--max-steps", 2)
    for line in ("epoch=0 step=1 role=policy stage=train_start pairs=6", "step=1 role=policy stage=train_end pairs=6"):
        assert line in log
    names = ["dpo_loss", "total_loss", "dpo_accuracy", "dpo_margin", "dpo_reward_margin", "dpo_chosen_reward"]
    names += ["dpo_rejected_reward", "dpo_response_len", "ref_logprob_forward_time_s", "grad_norm", "lr", "loss"]
    for record in metrics(tmp_path / "run", "train"):
        assert not [name for name in names if f"train/{name}" not in record]
