"""Effects of the settings of processes, with real replicas and ranks."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from areno.engine.parallel import workers
from areno.engine.parallel.layout import Layout
from areno.errors import ArenoError, EngineError
from areno.experiments.run_experiment import trainer_class
from areno.experiments.trainers import PPOTrainer
from tests.experiments.trainer_stage import run_kind, settings_of_kind, trainer_of
from tests.support.processes import alive


def environment_of(engine: Any) -> str | None:
    return os.environ.get("ARENO_TEST_MARK")


def test_replicas_are_separate_processes_that_get_weights_from_the_trainer(tiny_checkpoint, tmp_path):
    """Both have the environment variable, and weights are sent as files."""
    given: dict[str, Any] = {
        "rollout.backend": "areno:d2",
        "rollout.scheduling_spec.0.env_vars": {"ARENO_TEST_MARK": "a"},
        "actor.weight_update_mode": "disk",
        "total_train_steps": 2,
    }
    config = settings_of_kind("rl", tiny_checkpoint, tmp_path, given)
    sent: list[Path] = []
    with PPOTrainer(config) as trainer:
        replicas = trainer.fleet._up().values()  # type: ignore[union-attr]
        assert [group.run_on_all_ranks(environment_of) for group in replicas] == [["a"], ["a"]]
        pids = [pid for group in replicas for pid in group.workers.pids]
        assert len({os.getpid(), *pids}) == 3
        update = trainer.fleet.update_weights  # type: ignore[union-attr]

        def recorded(*args: Any) -> Any:
            report = update(*args)
            sent.extend(trainer.folders.checkpoints.rglob("*.safetensors"))
            return report

        trainer.fleet.update_weights = recorded  # type: ignore[union-attr,method-assign]
        trainer.train()
        assert sent
        versions = [record["ppo_actor/update/version_stats/v_theta"] for record in trainer.run_dir.read_metrics()]
        assert versions == [1, 2]
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("rl", {"rollout.setup_timeout": 0.05}), ("sft", {"actor.backend": "fsdp:d2", "actor.setup_timeout": 0.05})],
)
def test_a_start_fails_at_the_setup_timeout(tiny_checkpoint, tmp_path, kind, changes):
    config = settings_of_kind(kind, tiny_checkpoint, tmp_path, changes)
    with pytest.raises(ArenoError, match=r"0\.05 s"):
        trainer_class(config)(config)


def test_ranks_train_as_one_process_does(tiny_checkpoint, tmp_path, monkeypatch):
    """And without progress for ``request_timeout``, on a clock that is set forward, the ranks are ended."""
    alone = run_kind("sft", tiny_checkpoint, tmp_path / "1", {"saver.freq_steps": 2})
    given = {"actor.backend": "fsdp:d2", "actor.request_timeout": 90, "saver.freq_steps": 2}
    with trainer_of(settings_of_kind("sft", tiny_checkpoint, tmp_path / "2", given)) as trainer:
        assert trainer.engine.layout == Layout(2, 1, fsdp=True)
        trainer.train()
        (file,) = trainer.folders.checkpoints.rglob("*globalstep1/model.safetensors")
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.late, sleep=time.sleep, late=0.0)
        monkeypatch.setattr(workers, "time", clock)
        for late, seconds, outcome in (
            (60, 2, nullcontext()),
            (170, 60, pytest.raises(EngineError, match="no progress")),
        ):
            threading.Timer(0.5, setattr, (clock, "late", late)).start()
            with outcome:
                trainer.engine.run_on_all_ranks(lambda _engine, seconds: time.sleep(seconds), seconds)
    (other,) = alone.checkpoints.rglob("*globalstep1/model.safetensors")
    whole = load_file(other)
    for name, value in load_file(file).items():
        assert float((value - whole[name]).abs().max()) < 2e-3, name
