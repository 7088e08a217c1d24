"""Every documented statistic is recorded by a run that uses its feature."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areno.experiments.trainers.rl import PPOTrainer
from areno.observability.experiment_metrics import MEANS, documented
from areno.observability.step_memory import PEAK_GPU
from tests.experiments.trainer_stage import run_kind

_DECOUPLED = {
    "actor.use_decoupled_loss": True,
    "actor.prox_logp_method": "metrics",
    "actor.rejection_sampling": {"lower": 0.1, "upper": 5.0},
    "actor.c_clip": 3.0,
    "actor.eps_clip": 0.0001,  # so that some tokens are clipped
    "actor.ppo_n_minibatches": 2,
    "actor.kl_ctl": 0.1,
    "actor.kl_loss_coef": 0.1,
    "ref": {},
    "critic": {"path": "${actor.path}", "optimizer": {}},
    "recover.mode": "auto",
    "recover.freq_steps": 1,
    "saver.freq_steps": 1,
}
_DISTILLED = {
    "actor.use_sapo_loss": True,
    "teacher": {"path": "${actor.path}", "rollout": {}},
    "workflow.path": "multi_turn",
    "workflow.kwargs": {"max_turns": 2},
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoupled": ("rl", _DECOUPLED),
    "distilled": ("rl", _DISTILLED),
    **{kind: (kind, {}) for kind in ("sft", "rw", "dpo")},
}


@pytest.fixture(scope="module")
def records(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Metrics of each run, with an evaluation after each step."""
    found = {}
    for name, (kind, given) in RUNS.items():
        root = tmp_path_factory.mktemp(name)
        held_out = {"valid_dataset.path": str(root / f"{kind}.jsonl"), "valid_dataset.type": kind}
        held_out["valid_dataset.split"] = "train"  # the same rows, on purpose
        found[name] = run_kind(kind, tiny_checkpoint, root, {**held_out, "evaluator.freq_steps": 1, **given}).records
    return found


def test_the_health_monitor_finds_what_it_watches(records):
    names = PPOTrainer.known_names(SimpleNamespace(section="ppo_actor"))
    watched = {name: names[name] for name in ("loss", "grad_norm", "response_len", "logp_abs_diff_mean")}
    assert [name for name in watched.values() if name not in records["decoupled"][0]] == []


def test_every_documented_name_is_recorded(records):
    recorded = {name for run in records.values() for record in run for name in record}
    absent = set() if torch.cuda.is_available() else {PEAK_GPU}
    assert {name for _, one in documented() for name in one.numbers if name not in recorded} == absent
    assert [name for name in MEANS if name not in recorded] == []


def test_minimum_mean_and_maximum_of_statistics_are_ordered(records):
    for run in records.values():
        for record in run:
            for name in (name.removesuffix("/avg") for name in record if name.endswith("/avg")):
                if f"{name}/min" in record:
                    low, mean, high = (record[f"{name}/{part}"] for part in ("min", "avg", "max"))
                    assert low - 1e-6 <= mean <= high + 1e-6, name
    for record in records["decoupled"]:
        least, greatest = (record[f"ppo_actor/update/vocab_{end}_logits/avg"] for end in ("min", "max"))
        assert least < 0 < greatest
        assert record["ppo_actor/update/num_micro_batches"] == 1
        assert record["eval-rollout/accepted"] == 12
        assert record["eval-rollout/rejected"] == 0
