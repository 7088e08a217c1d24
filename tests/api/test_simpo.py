"""SimPO: its formula in float64, and whole runs of both front ends that load no reference."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.algorithms.simpo import SimPOOptions, simpo_loss_fn
from areno.cli.main import main
from tests.experiments.trainer_stage import run_kind
from tests.loss_fns import written_out
from tests.loss_fns.packs import QUICK, batches


@QUICK
@given(batch=batches(), beta=st.sampled_from([0.5, 2.0]), gamma=st.sampled_from([0.0, 1.0]))
def test_simpo_equals_its_formula(batch, beta, gamma):
    loss, _ = simpo_loss_fn(batch.pack, batch.logprobs, SimPOOptions(beta, gamma))
    assert float(loss) == pytest.approx(written_out.simpo(batch.rows, beta, gamma), rel=1e-6, abs=1e-9)


def test_both_front_ends_learn_from_pairs_without_a_reference(tmp_path, tiny_checkpoint):
    rows = [{"prompt": f"{a} and", "chosen": f"{a + 1}", "rejected": "What? I do not know."} for a in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--dataset-path", tmp_path / "pairs.jsonl", "--eval-dataset-path", tmp_path / "pairs.jsonl"]
    run = ["--ckpt", tiny_checkpoint, "--run-dir", tmp_path / "run", "--max-steps", "2", "--batch-size", "4"]
    assert main([*map(str, ["train", "--algo", "simpo", *data, *run]), "--lr", "1e-2", "--simpo-gamma", "0.5"]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "train/pair_loss" in record]
    assert trained[0]["train/pair_reward_margin"] < trained[1]["train/pair_reward_margin"]
    assert "train/ref_logprob_forward_time_s" not in trained[0]
    assert {"eval/loss", "eval/accuracy", "eval/reward_margin"} <= records[-1].keys() | records[-2].keys()

    settings = {"actor.algorithm": "simpo", "actor.algorithm_options": {"simpo_gamma": 0.5}, "total_train_steps": 2}
    experiment = run_kind("dpo", tiny_checkpoint, tmp_path / "experiment", settings)
    assert experiment.column("dpo/reward_margin/avg")
    assert not experiment.column("timeperf/ref_logp")
