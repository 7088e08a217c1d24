"""A run of either front end resolves to its newest model, wherever its settings put it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.config.experiment.experiments import SFTConfig
from areno.config.experiment.saving import config_text
from areno.errors import UsageError
from areno.experiments.folders import ExperimentFolders
from areno.spec import Frequency
from areno.storage.run_layout import OPTIONS, newest_model
from areno.training.frequency import StepInfo
from areno.training.saving import Saver


def stored(run: Path, text: str) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(text)
    return run


def checkpoint(folder: Path, step: int) -> str:
    (folder / "trainer_state").mkdir(parents=True)
    (folder / "trainer_state" / "state.json").write_text(json.dumps({"step": step}))
    return str(folder)


def model(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


def test_a_run_from_options_resolves_to_its_newest_checkpoint_or_model(tmp_path, monkeypatch):
    run = stored(tmp_path / "runs" / "a", "algo: gspo\n")
    with pytest.raises(UsageError, match=r"--ckpt .*a is a run without a checkpoint; specify a model folder"):
        newest_model(run, "--ckpt")
    checkpoint(run / "checkpoints/step_000005", 5)
    newest = checkpoint(run / "checkpoints/step_000012", 12)
    (run / "checkpoints/step_000200").mkdir()  # not a checkpoint, because it has no state
    assert newest_model(run, "--ckpt") == newest_model(run / "checkpoints", "--ckpt") == newest
    best = checkpoint(run / "checkpoints/best", 13)
    assert newest_model(run, "--ckpt") == best
    plain = model(run / "checkpoints/models/step_000014")
    model(run / "checkpoints/models/step_000009")
    assert newest_model(run, "--ckpt") == plain
    monkeypatch.chdir(tmp_path)
    stored(Path("runs/b"), "algo: gspo\nsave_path: elsewhere\n")
    checkpoint(Path("elsewhere/step_000007"), 7)
    assert newest_model("runs/b", "--ckpt") == "elsewhere/step_000007"
    for untouched in (newest, "model", "owner/name", "gone"):
        assert newest_model(untouched, "--ckpt") == untouched


def test_an_experiment_resolves_to_its_newest_recovery_checkpoint_or_model(tmp_path):
    config = SFTConfig(experiment_name="e", trial_name="t")
    config.cluster.fileroot = str(tmp_path / "root")
    folders = ExperimentFolders(config.cluster.fileroot, "e", "t")
    run = folders.create().path
    stored(run, config_text(config))
    model(folders.checkpoints / "default/epoch0epochstep9globalstep9")
    newest = model(folders.checkpoints / "default/epoch1epochstep1globalstep11")
    model(folders.checkpoints / "critic/epoch1epochstep9globalstep19")
    checkpoint(folders.recover / "step_000011", 11)
    assert Path(newest_model(run, "--ckpt")).samefile(newest)
    assert Path(newest_model(run / "checkpoints", "--ckpt")).samefile(newest)
    recovery = checkpoint(folders.recover / "step_000013", 13)
    assert Path(newest_model(run, "--ckpt")).samefile(recovery)
    config.recover.fileroot = str(tmp_path / "other")
    stored(run, config_text(config))
    moved = checkpoint(ExperimentFolders(config.recover.fileroot, "e", "t").recover / "step_000014", 14)
    assert newest_model(run, "--ckpt") == moved


def test_models_of_a_run_from_options_are_saved_where_the_reader_looks(tmp_path):
    run = stored(tmp_path / "run", "algo: sft\n")
    saver = Saver(run / "checkpoints", Frequency(1, 3), mode="sync", layout=OPTIONS)
    steps = [StepInfo(0, step, step, 9, 9) for step in range(9)]
    saved = [saver.save_if_due("default", at, lambda folder: (folder / "weights").touch()) for at in steps]
    assert [path.name for path in saved if path] == ["step_000003", "step_000006", "step_000009"]
    assert newest_model(run, "--ckpt") == str(run / "checkpoints/models/step_000009")
