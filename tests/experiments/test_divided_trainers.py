"""Whole runs with a trainer on several ranks: samples and saved weights equal those of a run on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.experiments.runs import RATE, Run, make_task, settings
from tests.experiments.test_kills import recorded_samples
from tests.support.tiny import save_tiny_checkpoint

STEPS = 3


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "moe", "qwen3_moe", heads=4, hidden=64)


@pytest.fixture(scope="module")
def outcome(task, tmp_path_factory):
    """Samples and weights of a run, made once for each backend and model."""
    known: dict[tuple[str, Path], tuple[list, dict]] = {}

    def of(backend: str, model: Path):
        if (backend, model) not in known:
            folder = tmp_path_factory.mktemp("run")
            changes = {"actor__backend": backend, "actor__path": model, "rollout__max_head_offpolicyness": 0}
            changes["actor__optimizer__eps"] = 1e-5  # Adam amplifies rounding errors of gradients near zero
            run = Run(
                folder, settings(task, folder / "files", total_train_steps=STEPS, saver__freq_steps=STEPS, **changes)
            )
            try:
                run.finish()
                [saved] = (run.checkpoints / "default").glob("*globalstep2/model.safetensors")
                known[backend, model] = recorded_samples(run), load_file(saved)
            finally:
                run.end()
        return known[backend, model]

    return of


@pytest.mark.long
@pytest.mark.parametrize(
    "backend", ["fsdp:c2", "fsdp:d2t2", "archon:d2e2", "archon:d2t2e2", "archon:p2", "megatron:d2p2"]
)
def test_a_run_on_several_trainer_ranks_equals_a_run_on_one(backend, task, moe, outcome):
    model = moe if "e" in backend.partition(":")[2] else task.model
    samples, weights = outcome(backend, model)
    expected_samples, expected = outcome("fsdp:d1", model)
    assert samples == expected_samples
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (weights[name] - tensor).abs().max() < RATE / 100, name
