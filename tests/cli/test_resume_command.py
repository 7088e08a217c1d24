"""Either command passes ``--resume RUN`` to the front end that wrote the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.cli.main import main
from areno.config.experiment.experiments import SFTConfig
from areno.config.experiment.loader import load_expr_config
from areno.config.experiment.saving import config_text
from areno.experiments.folders import ExperimentFolders

SFT = Path(__file__).parents[2] / "examples/experiments/sft.yaml"


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The run directory of an experiment."""
    config, _ = load_expr_config(["--config", str(SFT), f"cluster.fileroot={tmp_path}"], SFTConfig)
    run = ExperimentFolders(str(tmp_path), "toy", "sft").create()
    run.write_config(config_text(config))
    return run.path


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize("form", ["--resume {}", "--resume={}"])
def test_an_experiment_without_recovery_checkpoints_is_refused(experiment, capsys, command, form):
    assert main([command, *form.format(experiment).split()]) == 2
    assert (
        "recover.mode is disabled, so the run has no recovery checkpoints and cannot be resumed"
        in capsys.readouterr().err
    )


def test_a_moved_experiment_is_refused(experiment, capsys):
    moved = experiment.rename(experiment.with_name("moved"))
    assert main(["run", "--resume", str(moved)]) == 2
    assert f"this run belongs in {experiment}; move the run back to this directory" in capsys.readouterr().err


def test_an_unknown_setting_is_refused(experiment, capsys):
    assert main(["train", "--resume", str(experiment), "recover.mdoe=auto"]) == 2
    assert "recover.mode" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "run"])
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, capsys, command):
    assert main([command, "--resume", str(tmp_path)]) == 2
    assert "is not a run directory; pass the directory that contains config.yaml" in capsys.readouterr().err
