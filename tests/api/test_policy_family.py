"""The policy loss in ``areno train``: log-probs that its options need are scored before the update."""

from __future__ import annotations

import json

import pytest

from areno.cli.main import main
from tests.support.cli import task_arguments, write_task


def test_rows_of_the_decoupled_loss_are_scored_before_the_update(tmp_path, tiny_checkpoint):
    knobs = ["--use-decoupled-loss", "--m2-threshold", "1e-30", "--eps-clip", "0", "--update-minibatches", "2"]
    arguments = task_arguments("dapo", tiny_checkpoint, write_task(tmp_path / "task", rows=6), tmp_path / "run")
    assert main([*map(str, arguments), "--max-steps", "1", *knobs]) == 0
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert record["train/behave_imp_weight/avg"] == pytest.approx(1, abs=1e-5)  # same weights as in the rollout
    assert 0 < record["train/m2_filtered_fraction"] < 1  # the threshold is below rounding errors
    assert record["train/grad_norm"] > 0
