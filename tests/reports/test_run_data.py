"""Data read from run directories of both front ends."""

from __future__ import annotations

from areno.reports.run_data import RunData
from areno.storage.run_dir import RunDirectory


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
