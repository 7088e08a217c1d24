"""``areno replay``: the same options and weights give the same update bit for bit, others what their formulas predict."""

from __future__ import annotations

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from areno.cli.main import main
from tests.replay.conftest import OPTIONS, of_step
from tests.support.cli import task_arguments, write_task
from tests.support.examples import some_quick

TIMES = ("_time_s", "tokens_per_second")
OF_SAMPLES = (
    *("reward_mean", "reward_errors", "empty_responses", "zero_std_groups", "truncated_ratio", "sampling_cut_mass"),
    *(
        "old_logprob",
        "critic_value_m",
        "critic_value_s",
        "return",
        "gae_advantage",
        "normalized_advantage",
        "kl_reward",
    ),
    *("critic_explained_variance", "m2_filtered_fraction", "ref_logprob", "agent_"),
)
"""Statistics of the rollout and of advantages, which a replay does not recompute."""
OF_UPDATE = ("critic_value_mse",)


def replay(run, step, *more):
    return main(["replay", str(run), "--step", str(step), *map(str, more)])


def update_of(run, step):
    """The statistics of the update in metrics.jsonl."""
    (record,) = of_step(run, step)
    names = [name.removeprefix("train/") for name in record if name.startswith("train/") and not name.endswith(TIMES)]
    return {n: record[f"train/{n}"] for n in names if n in OF_UPDATE or not n.startswith(OF_SAMPLES)}


def contents(folder):
    """Every file below a folder, with its digest and modification time."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def tensors(checkpoint):
    """Weights and optimizer states of a checkpoint."""
    return {
        (str(path.relative_to(checkpoint)), name): value
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("name", some_quick(OPTIONS, "gspo", "ppo", "agent"))
def test_the_same_options_give_the_recorded_update_bit_for_bit(name, runs, tmp_path, capsys):
    run, out = runs(name), tmp_path / "out"
    before = contents(run)
    capsys.readouterr()
    assert replay(run, 2, "--out", out) == 0
    shown = capsys.readouterr().out
    assert contents(run) == before, "the run directory is only read"
    recorded, replayed = update_of(run, 2), update_of(out, 2)
    assert recorded.keys() == replayed.keys() >= {"loss", "grad_norm", "lr", "train_logprobs_mean"}
    assert replayed == recorded
    ours, theirs = (tensors(folder / "checkpoints" / "step_000003") for folder in (out, run))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for key, value in ours.items():
        assert np.array_equal(value, theirs[key]), key
    assert "step_000002 (the starting weights of the step)" in shown
    assert f"{48 if name == 'agent' else 24} rows (all rows of the step)" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("train/")]
    assert {row[0].removeprefix("train/") for row in rows} == replayed.keys()
    for title, before_text, after_text, difference in rows:
        assert float(before_text) == float(after_text)
        assert float(after_text) == pytest.approx(recorded[title.removeprefix("train/")], rel=1e-6)
        assert difference == "0"


def test_without_an_output_directory_nothing_is_left_behind(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = runs("grpo")
    before = contents(run)
    capsys.readouterr()
    assert replay(run, 1) == 0
    assert contents(run) == before
    assert [path for path in tmp_path.iterdir() if path.name.startswith("areno-replay")] == []
    assert {line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("train/")} == {"0"}


def test_older_weights_are_reported_and_give_another_update(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs("gspo"), run)
    shutil.rmtree(run / "checkpoints" / "step_000002")
    capsys.readouterr()
    assert replay(run, 2, "--out", tmp_path / "out") == 0
    assert "step_000001 (1 step older than the starting weights of the step)" in capsys.readouterr().out
    assert update_of(tmp_path / "out", 2)["logp_abs_diff_mean"] > 1e-3
    damaged = run / "checkpoints" / "step_000001" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = contents(run)
    assert replay(run, 2) == 0
    assert "the initial model (2 steps older" in capsys.readouterr().out
    assert contents(run) == before


def test_changed_options_have_the_expected_effects(runs, tmp_path, capsys):
    run, out = runs("gspo"), tmp_path / "out"
    capsys.readouterr()
    assert replay(run, 2, "--lr", "2e-4", "--min-lr", "2e-5", "--kl-coef", "0.3", "--out", out) == 0
    shown = capsys.readouterr().out
    assert "changed: --kl-coef 0.3 (recorded: 0.1)" in shown
    assert "changed: --lr 0.0002 (recorded: 0.001)" in shown
    recorded, replayed = update_of(run, 2), update_of(out, 2)
    decayed = 2e-5 + (2e-4 - 2e-5) * (1 + math.cos(math.pi * 3 / 1000)) / 2
    assert replayed["lr"] == pytest.approx(decayed, rel=1e-6)
    assert replayed["kl_loss"] == recorded["kl_loss"]
    expected = replayed["policy_loss"] + 0.3 * replayed["kl_loss"]
    assert replayed["loss"] == pytest.approx(expected, rel=1e-4)
    (line,) = [line.split() for line in shown.splitlines() if line.startswith("train/kl_coef ")]
    assert line[1:] == ["0.1", "0.3", "+0.2"]
    assert "kl_coef: 0.3" in (out / "config.yaml").read_text()


def pushes(samples):
    """Yield how far each answer's mean ratio has moved in the direction of its advantage, and its clip flags."""
    for sample in samples:
        segments = [segment for segment in sample["rows"][0] if segment["trained"]]
        gaps = [a - b for s in segments for a, b in zip(s["train_logprobs"], s["logprobs"], strict=True)]
        sign = math.copysign(1, segments[0]["advantages"][0])
        yield (
            sign * (math.exp(sum(gaps) / len(gaps)) - 1),
            {flag for segment in segments for flag in segment["clipped"]},
        )


def test_another_algorithm_trains_on_the_same_rows(runs, tmp_path, capsys):
    """GSPO clips whole answers by their mean log-ratio: none in the first update, one in the second."""
    run = runs("grpo")
    once = ("--algo", "gspo", "--update-epochs", 1, "--update-minibatches", 1, "--updates", 2)
    assert replay(run, 2, *once, "--gspo-clip-eps", 0.5, "--out", tmp_path / "wide") == 0
    moved = sorted(push for push, _ in pushes(of_step(tmp_path / "wide", 3, "samples.jsonl")))
    eps = (moved[-1] + moved[-2]) / 2  # between the two that moved most
    assert eps > 1e-4
    out = tmp_path / "out"
    assert replay(run, 2, *once, "--gspo-clip-eps", eps, "--out", out) == 0
    assert "changed: --algo gspo (recorded: grpo)" in capsys.readouterr().out
    first, second = update_of(out, 2), update_of(out, 3)
    assert first["policy_loss"] == pytest.approx(0, abs=1e-6)
    assert first["clip_fraction"] == 0 < second["clip_fraction"]
    marks = [(push > eps, flags) for push, flags in pushes(of_step(out, 3, "samples.jsonl"))]
    assert all(flags == {clipped} for clipped, flags in marks)
    assert sum(clipped for clipped, _ in marks) == 1


def test_updates_can_be_repeated_on_the_same_rows(runs, tmp_path, capsys):
    run, out = runs("grpo"), tmp_path / "out"
    capsys.readouterr()
    assert replay(run, 2, "--updates", "3", "--out", out) == 0
    assert update_of(out, 2) == update_of(run, 2)
    last = update_of(out, 4)
    assert last["logp_abs_diff_mean"] > 1e-3
    header, *rows = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("statistic", "train/")))
    assert header.split() == ["statistic", "recorded", "update", "1", "update", "3", "difference"]
    shown = {row.split()[0]: row.split()[1:] for row in rows}
    name = "logp_abs_diff_mean"
    assert [float(x) for x in shown[f"train/{name}"][:3]] == pytest.approx(
        [update_of(run, 2)[name], update_of(out, 2)[name], last[name]], rel=1e-6
    )
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == [f"step_00000{n}" for n in (3, 4, 5)]


@pytest.mark.parametrize("name", ["gspo", "agent"])
def test_advantages_are_computed_from_all_recorded_rewards(name, runs, tmp_path, capsys):
    """The reward of a sample counts once, however many rows it has."""
    run, out = runs(name), tmp_path / "out"
    capsys.readouterr()
    assert replay(run, 2, "--advantage", "batch", "--out", out) == 0
    assert "advantages: computed from the recorded rewards" in capsys.readouterr().out
    arrays = load_file(run / "rollouts" / "step_000002.safetensors")
    starts = [0, *arrays["lengths"].cumsum()[:-1]]
    answers = np.add.reduceat((~arrays["prompt_mask"]).astype(int), starts)
    samples, firsts = np.unique(arrays["sample"], return_index=True)
    rewards = arrays["reward"][firsts]
    assert len(samples) == 24
    expected = ((rewards - rewards.mean()) / rewards.std())[arrays["sample"]]
    (record,) = of_step(out, 2)
    mean = (expected * answers).sum() / answers.sum()
    assert record["rollout/advantages_mean"] == pytest.approx(mean, abs=1e-4)
    spread = math.sqrt((expected**2 * answers).sum() / answers.sum() - mean**2)
    assert record["rollout/advantages_std"] == pytest.approx(spread, rel=1e-3)


def test_advantages_with_a_critic_are_computed_with_its_recorded_state(runs, tmp_path, capsys):
    run, out = runs("ppo"), tmp_path / "out"
    assert replay(run, 2, "--lam", "0.5", "--out", out) == 0
    assert "computed from the recorded rewards" in capsys.readouterr().out
    (recorded,), (replayed,) = of_step(run, 2), of_step(out, 2)
    for name in ("train/critic_value_mean", "train/old_logprob_mean", "train/kl_reward_mean"):
        assert replayed[name] == recorded[name], "values and log-probs do not depend on lambda"
    assert replayed["train/return_mean"] != recorded["train/return_mean"]


def test_recorded_samples_are_used_if_rollouts_are_not_saved(runs, tmp_path, capsys):
    run, out = runs("gspo"), tmp_path / "out"
    capsys.readouterr()
    assert replay(run, 0, "--out", out) == 0
    shown = capsys.readouterr().out
    samples = of_step(run, 0, "samples.jsonl")
    assert (
        f"step 0: {len(samples)} rows (only the recorded samples; the statistics therefore differ from those of the run)"
        in shown
    )
    assert "the initial model (the starting weights of the step)" in shown
    record = update_of(out, 0)
    lengths = [sample["response_len"] for sample in samples]
    assert record["response_len"] == pytest.approx(sum(lengths) / len(lengths))
    tokens = [x for s in samples for segment in s["rows"][0] if segment["trained"] for x in segment["logprobs"]]
    assert record["rollout_logprobs_mean"] == pytest.approx(sum(tokens) / len(tokens), abs=1e-5)
    assert record["logp_abs_diff_mean"] < 2e-6, "recorded with six decimals, under the same weights"
    assert replay(run, 0, "--advantage", "batch") == 2
    assert "only some samples were recorded; train with --save-rollouts" in capsys.readouterr().err


def test_a_saved_replay_is_a_run_that_can_be_resumed(runs, tmp_path):
    out = tmp_path / "out"
    assert replay(runs("gspo"), 2, "--lr", "2e-3", "--out", out) == 0
    assert main(["train", "--resume", str(out), "--max-steps", "4"]) == 0
    assert [line["step"] for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())] == [2, 3]
    assert update_of(out, 3)["lr"] == pytest.approx(2e-3, rel=1e-2)


PROBLEMS = {
    "a step that is not there": (
        ["--step", "9"],
        "has no training rows of this step; training rows were recorded for steps 0 to 2",
    ),
    "a negative step": (["--step", "-1"], "--step must be at least 0, got -1"),
    "no update": (["--step", "2", "--updates", "0"], "--updates must be at least 1, got 0"),
    "an option of the rollout": (
        ["--step", "2", "--temperature", "2"],
        "--temperature has no effect, because areno replay repeats updates",
    ),
    "a typing error": (["--step", "2", "--lrr", "1"], "--lrr is not an option (did you mean --lr?)"),
    "an option of another algorithm": (["--step", "2", "--lam", "0.9"], "--lam 0.9 applies to --algo ppo, not to"),
    "an algorithm with a critic": (["--step", "2", "--algo", "ppo"], "cannot train on samples of gspo"),
    "an algorithm without rollouts": (["--step", "2", "--algo", "dpo"], "cannot train on samples of gspo"),
    "weights of parts that are not there": (
        ["--step", "2", "--reward-weights", "a=2"],
        "have no parts, so weights have no effect",
    ),
    "another value": (["--step", "2", "--lr", "fast"], "--lr 'fast': expected a number"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_impossible_replays_are_one_line_errors(problem, runs, capsys):
    arguments, message = PROBLEMS[problem]
    run = runs("gspo")
    capsys.readouterr()
    assert main(["replay", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_other_folders_and_runs_are_refused(tmp_path, tiny_checkpoint, runs, capsys):
    assert replay(tmp_path, 0) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert replay(runs("gspo"), 2, "--out", tmp_path) == 2
    assert "exists; choose a new directory" in capsys.readouterr().err
    run = tmp_path / "sft"
    arguments = task_arguments("sft", tiny_checkpoint, write_task(tmp_path / "task"), run)
    assert main([*map(str, arguments), "--max-steps", "1"]) == 0
    assert replay(run, 0) == 2
    assert "trains on its dataset, so there are no samples to replay" in capsys.readouterr().err
