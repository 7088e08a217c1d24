"""Data read from run directories of both front ends."""

from __future__ import annotations

import numpy as np

from areno.reports.run_data import RunData
from areno.reports.run_samples import RunSamples
from areno.storage.run_dir import RunDirectory
from tests.reports.prepared import Prepared, policy_metrics, sample


def test_a_reward_part_is_read_as_its_mean_for_both_front_ends(tmp_path):
    """An experiment also records the minimum and the maximum of each part, which are not parts themselves."""
    for front_end, metrics in {
        "train": {"rollout/reward_parts/short": 0.25, "rollout/reward_parts/right": 1.0},
        "run": {
            f"rollout/reward_parts/{part}/{number}": value
            for part, values in {"short": (0.25, 0.0, 1.0), "right": (1.0, 1.0, 1.0)}.items()
            for number, value in zip(("avg", "min", "max"), values, strict=True)
        },
    }.items():
        run = RunDirectory(tmp_path / front_end).create()
        run.append_metrics(0, metrics)
        parts = RunData(run.path).reward_parts()
        assert {name: series.values.tolist() for name, series in parts.items()} == {"short": [0.25], "right": [1.0]}


def test_the_pairs_that_changed_most_exclude_missing_rewards(tmp_path):
    """Each of four prompts is answered in steps 0 and 1, with the rewards (0, 0.5), (nan, 1), (1, 1) and (1, -1)."""
    rewards = [[0.0, float("nan"), 1.0, 1.0], [0.5, 1.0, 1.0, -1.0]]
    samples = [
        sample(step, prompt, 0, reward, prompt=f"Question {prompt}")
        for step in (0, 1)
        for prompt, reward in enumerate(rewards[step])
    ]
    run = Prepared(policy_metrics(np.random.default_rng(0), 2), samples=samples).write(tmp_path / "run")
    shown = RunSamples(RunData(run.path))
    assert [shown.rewards[last] for _, last in shown.changes(9)] == [-1.0, 0.5]
