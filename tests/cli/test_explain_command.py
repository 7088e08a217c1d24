"""``areno explain`` describes a metric of either front end, and its values in a run."""

from __future__ import annotations

import json

import pytest

from areno.cli.main import main


@pytest.fixture
def run_dir(tmp_path):
    """A run whose clip fraction leaves the normal range twice, and returns to it."""
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    values = [0.0, 0.3, "NaN", 0.1]
    lines = [{"step": step, "time": 1.0, "train/clip_fraction": value} for step, value in enumerate(values)]
    lines[-1] |= {"train/own\x1b[2J": 2.5, "rollout/rewards_mean": 0.5, "rollout/reward_parts/short": 0.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def explain(capsys, *arguments, code=0):
    assert main(["explain", *map(str, arguments)]) == code
    output = capsys.readouterr()
    return output.out if code == 0 else output.err


@pytest.mark.parametrize("name", ["clip_fraction", "train/clip_fraction"])
def test_a_metric_is_found_by_its_short_or_full_name(capsys, name):
    lines = explain(capsys, name).splitlines()
    assert lines[0] == "train/clip_fraction (areno train)"
    labels = [line.split()[0] for line in lines if line[2:3].strip()]
    assert labels[1:5] == ["meaning", "unit", "normal", "if"]
    text = " ".join(" ".join(lines).split())
    assert "normal 0 to 0.2;" in text
    assert "--update-epochs" in text


def test_each_number_of_an_experiment_statistic_is_explained_with_yaml_settings(capsys):
    for name in ("ppo_actor/update/clip_ratio/avg", "ppo_actor/actor_clip_ratio/max", "ppo_actor/update/clip_ratio"):
        text = explain(capsys, name)
        assert text.startswith("ppo_actor/update/clip_ratio (areno run)\n")
        assert "actor.ppo_n_epochs" in text
        assert "--update-epochs" not in text


def test_a_metric_of_both_front_ends_names_the_other_one_too(capsys):
    text = explain(capsys, "reward")
    assert text.startswith("rollout/rewards_mean (areno train)\n")
    assert "rollout/reward (areno run)" in text


def test_update_metrics_are_explained_under_the_prefix_of_either_front_end(capsys):
    assert "nats" in explain(capsys, "ppo_actor/update/logp_abs_diff_mean")
    assert "importance" in explain(capsys, "train/ratio_mean")
    assert explain(capsys, "train/importance_weight/avg").startswith("train/importance_weight (areno train)\n")


def test_reward_parts_of_any_name_and_pass_at_any_k_are_explained(capsys):
    assert explain(capsys, "reward_parts/short").startswith("rollout/reward_parts/short (areno train)\n")
    assert explain(capsys, "pass@16").startswith("eval/pass@16 (areno train)\n")


def test_a_typo_gets_the_nearest_name(capsys):
    assert "'clip_fractoin' is not a metric (did you mean clip_fraction?)" in explain(capsys, "clip_fractoin", code=2)
    assert "run `areno explain` to list all metrics" in explain(capsys, "qqqqqq", code=2)


def test_all_metrics_are_listed_by_section_with_one_line_each(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    lines = explain(capsys).splitlines()
    assert max(map(len, lines)) <= 72
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert "The update (areno train)" in titles
    assert "The actor's update (areno run)" in titles
    names = [line.split()[0] for line in lines if line.startswith(" ")]
    assert {"train/entropy", "eval/pass@K", "time/rollout", "ppo_actor/update/entropy"} <= {*names}
    twice = {name for name in names if names.count(name) > 1}  # both front ends record them
    assert len({*names}) > 300
    assert {name.split("/")[0] for name in twice} == {"memory"}


def test_values_of_a_run_are_shown_and_compared_with_the_normal_range(capsys, run_dir):
    text = explain(capsys, "clip_fraction", "--run", run_dir)
    assert f"train/clip_fraction in {run_dir}: 4 values, steps 0 to 3" in text
    assert "first 0   last 0.1   min 0   max 0.3" in text
    assert "the last value is in the normal range (0 to 0.2); 2 of 4 values are outside" in text
    assert "▁█ ▃" in text


def test_with_a_run_a_name_means_the_metric_that_the_run_recorded(capsys, run_dir):
    text = explain(capsys, "reward", "--run", run_dir)
    assert text.startswith("rollout/rewards_mean (areno train)\n")
    assert "areno run" not in text
    assert "has not recorded this metric" in explain(capsys, "sft/loss", "--run", run_dir)
    listed = explain(capsys, "--run", run_dir)
    assert [line.split()[0] for line in listed.splitlines() if line.startswith(" ")] == [
        "rollout/rewards_mean",
        "rollout/reward_parts/short",
        "train/clip_fraction",
    ]


def test_a_custom_metric_is_shown_without_control_characters(capsys, run_dir):
    text = explain(capsys, "train/own\x1b[2J", "--run", run_dir)
    assert "areno does not document this metric" in text
    assert "first 2.5   last 2.5" in text
    assert "\x1b" not in text


def test_a_folder_that_is_not_a_run_is_refused(capsys, tmp_path):
    assert "not a run directory" in explain(capsys, "reward", "--run", tmp_path, code=2)
