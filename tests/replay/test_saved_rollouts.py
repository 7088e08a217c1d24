"""Saved rollouts: files hold the rows of a step exactly, and the requested number of them is kept."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from areno.cli.main import main
from areno.errors import ArenoError, UsageError
from areno.storage.rollout_files import RolloutFiles
from areno.storage.run_dir import RunDirectory
from areno.training.saved_rows import arrays_of, rows_of_arrays
from areno.types import TrainSequence, WeightedReward, parts_of
from tests.experiments.trainer_stage import run_kind, settings_of_kind
from tests.replay.conftest import of_step, run_training
from tests.support.examples import examples

LISTS = ("returns", "values", "ref_logprobs", "prox_logprobs", "teacher_logprobs")


def random_rows(seed):
    """Rows with some of the optional fields, each in all rows or in none, as a train call requires."""
    rng = random.Random(seed)
    present = {
        name for name in (*LISTS, "versions", "keep", "loss_mask", "parts", "routed_experts") if rng.random() < 0.5
    }

    def numbers(count):
        return [rng.choice([rng.gauss(0, 1), 0.5, -1.0 / 3, 1e300, math.nan, math.inf]) for _ in range(count)]

    rows = []
    for group in range(rng.randint(1, 5)):
        n = rng.randint(1, 9)
        fields = {name: numbers(n) for name in LISTS if name in present}
        fields |= {"versions": [rng.randint(-1, 9) for _ in range(n)]} if "versions" in present else {}
        fields |= {"keep": [rng.random() < 0.5 for _ in range(n)]} if "keep" in present else {}
        if "loss_mask" in present and rng.random() < 0.7:
            fields["loss_mask"] = [rng.random() < 0.5 for _ in range(n)]
        if "routed_experts" in present and rng.random() < 0.7:
            fields["routed_experts"] = np.array(rng.choices(range(8), k=n * 6), np.uint8).reshape(n, 3, 2)
        reward: float = rng.random()
        if "parts" in present:
            reward = WeightedReward(reward, {"a": rng.random(), "b": 1 / 3})
        rows.append(
            TrainSequence(
                [rng.random() < 0.5 for _ in range(n)],
                [rng.randrange(2**31) for _ in range(n)],
                logprobs=numbers(n),
                advantages=numbers(n),
                reward=reward,
                eos_token_id=rng.randrange(9),
                temperature=rng.choice([0.7, 1.0]),
                group=group,
                truncated=rng.random() < 0.5,
                **fields,
            )
        )
    return rows


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_rows_are_restored_exactly(seed):
    rows = random_rows(seed)
    saved = rows_of_arrays(arrays_of(rows, range(3, 3 + len(rows))))
    assert saved.samples == list(range(3, 3 + len(rows)))
    for row, back in zip(rows, saved.rows, strict=True):
        for field in dataclasses.fields(TrainSequence):
            before, after = getattr(row, field.name), getattr(back, field.name)
            if field.name == "routed_experts":
                none = np.full((len(row.tokens), 3, 2), 255, np.uint8)
                assert (after is None) == all(other.routed_experts is None for other in rows)
                assert after is None or np.array_equal(after, none if before is None else before)
            elif field.name == "loss_mask":
                assert after == (before or [True] * len(row.tokens))
            else:
                assert repr(after) == repr(before), field.name  # bit for bit; as text, NaN equals itself
        assert parts_of(back.reward) == parts_of(row.reward)
        assert back.knows_temperature
        assert back.trainable() == row.trainable()


def test_a_file_holds_what_the_step_sampled_and_trained_on(runs):
    run = runs("grpo")
    arrays = load_file(run / "rollouts" / "step_000002.safetensors")
    ends = arrays["lengths"].cumsum()
    assert len(ends) == 24
    assert ends[-1] == len(arrays["tokens"]) == len(arrays["logprobs"]) == len(arrays["prompt_mask"])
    (metrics,) = of_step(run, 2)
    assert arrays["reward"].mean() == pytest.approx(metrics["rollout/rewards_mean"], rel=1e-12)
    assert arrays["logprobs"][~arrays["prompt_mask"]].mean() == pytest.approx(
        metrics["rollout/logprobs_mean"], rel=1e-6
    )
    assert set(arrays["versions"][~arrays["prompt_mask"]].tolist()) == {8}, "steps 0 and 1 made 8 optimizer steps"
    assert set(arrays["temperature"].tolist()) == {0.9}
    for sample in of_step(run, 2, "samples.jsonl"):
        row = 4 * sample["prompt_index"] + sample["sample_index"]
        begin, end = ends[row] - arrays["lengths"][row], ends[row]
        segments = sample["rows"][0]
        assert arrays["tokens"][begin:end].tolist() == [token for segment in segments for token in segment["tokens"]]
        advantages = [value for segment in segments for value in segment["advantages"]]
        assert arrays["advantages"][begin:end].tolist() == pytest.approx(advantages, abs=1e-6)
        assert (arrays["group"][row], arrays["reward"][row]) == (sample["prompt_index"], sample["reward"])


def saved_steps(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else None


def files_of(*steps):
    return [f"step_{step:06d}.safetensors" for step in steps]


def test_the_newest_steps_are_kept_and_a_resumed_run_drops_those_it_repeats(tmp_path, tiny_checkpoint, runs):
    assert saved_steps(runs("grpo") / "rollouts") == files_of(1, 2)
    run = run_training(tmp_path, tiny_checkpoint, "grpo", "--save-rollouts", "all")
    assert saved_steps(run / "rollouts") == files_of(0, 1, 2)
    assert main(["train", "--resume", str(run), "--resume-step", "1", "--max-steps", "2"]) == 0
    assert saved_steps(run / "rollouts") == files_of(0, 1)
    assert yaml.safe_load((run / "config.yaml").read_text())["save_rollouts"] == "all"


@pytest.mark.parametrize("kept", [None, "0"])
def test_without_the_option_nothing_is_saved(kept, tmp_path, tiny_checkpoint):
    run = run_training(
        tmp_path, tiny_checkpoint, "gspo", "--max-steps", "1", *(["--save-rollouts", kept] if kept else [])
    )
    assert saved_steps(run / "rollouts") is None


@pytest.mark.parametrize("value", ["-1", "some", "1.5", "²"])
def test_an_invalid_value_is_refused(value, tmp_path, tiny_checkpoint, capsys):
    arguments = ["--ckpt", str(tiny_checkpoint), "--run-dir", str(tmp_path), "--dataset-path", "gsm8k:main"]
    assert main(["train", *arguments, "--save-rollouts", value]) == 2
    assert f"--save-rollouts {value!r} is neither a number of steps nor all" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"rollout.save_rollouts .* is neither"):
        settings_of_kind("rl", tiny_checkpoint, tmp_path, {"rollout.save_rollouts": value})


def test_an_algorithm_without_rollouts_has_none_to_save(tmp_path, tiny_checkpoint, capsys):
    arguments = ["--ckpt", str(tiny_checkpoint), "--run-dir", str(tmp_path), "--dataset-path", "gsm8k:main"]
    assert main(["train", "--algo", "sft", *arguments, "--save-rollouts", "3"]) == 2
    assert "--save-rollouts 3 has no effect with --algo sft" in capsys.readouterr().err


@pytest.mark.parametrize(("kept", "steps"), [("1", [1]), ("all", [0, 1]), (None, None)])
def test_an_experiment_saves_the_rows_that_it_trains_on(kept, steps, tmp_path, tiny_checkpoint):
    run = run_kind("rl", tiny_checkpoint, tmp_path, {"rollout.save_rollouts": kept})
    assert saved_steps(run.folder / "rollouts") == (steps and files_of(*steps))
    if steps:
        arrays = load_file(run.folder / "rollouts" / "step_000001.safetensors")
        assert arrays["reward"].mean() == pytest.approx(run.column("rollout/reward/avg")[1])
        assert len(arrays["lengths"]) == run.column("ppo_actor/n_seqs")[1]
        assert len(arrays["tokens"]) == run.column("ppo_actor/n_tokens")[1]


def test_a_damaged_or_unwritable_file_is_a_clear_error(tmp_path):
    files = RolloutFiles(tmp_path / "rollouts", 5)
    files.write(3, {"x": np.arange(3)})
    files.path(3).write_bytes(b"not tensors")
    with pytest.raises(ArenoError, match=r"step_000003\.safetensors cannot be read"):
        files.read(3)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArenoError, match="save fewer steps with --save-rollouts"):
        RolloutFiles(tmp_path / "file", 5).write(0, {"x": np.arange(3)})


def test_truncation_keeps_the_rollouts_of_earlier_steps(tmp_path):
    run_dir = RunDirectory(tmp_path).create()
    files = RolloutFiles(run_dir.rollouts_path, math.inf)
    for step in (0, 1, 2, 1_000_000):
        files.write(step, {"x": np.arange(3)})
    (run_dir.rollouts_path / "notes.txt").write_text("mine")
    run_dir.truncate_after(1)
    assert files.steps() == [0, 1]
    assert (run_dir.rollouts_path / "notes.txt").exists()
    run_dir.truncate_after(-1)
    assert files.steps() == []
