"""An experiment that is asked to stop saves its last step, and resumes from there; one that cannot learn says so."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import areno  # noqa: F401  (before torch)
from areno.errors import CheckpointError, UsageError
from areno.experiments.folders import ExperimentFolders
from areno.storage.run_status import read_status
from areno.training.frequency import StepInfo
from examples.experiments import toy
from tests.experiments.trainer_stage import InProcessTrainer, settings_of_kind, trainer_of
from tests.support.cli import areno as run_areno
from tests.support.cli import start, wait_for_text

SFT = Path(__file__).resolve().parents[2] / "examples/experiments/sft.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    toy.make_model(folder / "model")
    torch.set_num_threads(threads)
    toy.write(folder / "sft.jsonl", toy.rows(32, 1))
    return folder


def words(made: Path, root: Path, steps: int, **changes: Any) -> list[str]:
    root.mkdir(exist_ok=True)
    given = {"cluster.fileroot": root, "train_dataset.path": made / "sft.jsonl", "actor.path": made / "model"}
    given |= {"total_train_epochs": 10**6, "total_train_steps": steps, "saver.freq_epochs": "null"}
    given |= {"actor.optimizer.warmup_steps_proportion": 0.0, **changes}  # else the rate depends on the number of steps
    return ["run", str(SFT), *(f"{name.replace('__', '.')}={value}" for name, value in given.items())]


def models(root: Path) -> list[Path]:
    return sorted(root.glob("checkpoints/*/toy/sft/default/epoch*/model.safetensors"))


def stopped(made: Path, root: Path, signum: int, **changes: Any) -> str:
    """Output of a run that gets a signal after some steps."""
    process = start(*words(made, root, 10**6, **changes))
    wait_for_text(process, "global step 5 ")
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, output
    return str(output)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_stopped_run_resumes_bit_for_bit(made: Path, tmp_path: Path, signum: int) -> None:
    output = stopped(made, tmp_path / "stopped", signum, recover__mode="auto", recover__freq_epochs=10**5)
    assert "run the same command again" in output
    (point,) = (tmp_path / "stopped").glob("checkpoints/*/toy/sft/recover/step_*")
    steps = int(point.name.removeprefix("step_")) + 3
    more = {"recover__mode": "auto", "recover__freq_epochs": 10**5}
    again = words(made, tmp_path / "stopped", steps, **more)
    if signum == signal.SIGTERM:  # `areno train --resume` needs only the directory of the run
        (run,) = (tmp_path / "stopped").glob("logs/*/toy/sft")
        again = ["train", "--resume", str(run), f"total_train_steps={steps}"]
    assert run_areno(*again).returncode == 0
    assert run_areno(*words(made, tmp_path / "whole", steps, **more)).returncode == 0
    (one,), (other,) = models(tmp_path / "stopped"), models(tmp_path / "whole")
    before, after = load_file(one), load_file(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_recovery_the_model_is_saved(made: Path, tmp_path: Path) -> None:
    output = stopped(made, tmp_path, signal.SIGTERM)
    assert "recover.mode=auto" in output
    (model,) = models(tmp_path)
    step = int(model.parent.name.rpartition("globalstep")[2])
    assert f"stopping now; {step + 1} steps completed" in output


def test_with_saving_off_no_model_is_saved(made: Path, tmp_path: Path) -> None:
    stopped(made, tmp_path, signal.SIGTERM, saver__mode="off")
    assert not models(tmp_path)


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (ValueError("bad rows"), {"state": "failed", "error": "ValueError: bad rows"}),
        (KeyboardInterrupt(), {"state": "stopped", "signal": "SIGINT"}),
        (None, {"state": "finished"}),
    ],
)
def test_a_program_that_uses_a_trainer_records_how_it_ended(
    tiny_checkpoint: Path, tmp_path: Path, kind: str, error: BaseException | None, ended: dict[str, str]
) -> None:
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, trainer_of(settings_of_kind(kind, tiny_checkpoint, tmp_path, {"saver.mode": "off"})) as trainer:
        if error is not None:
            raise error
    status = read_status(trainer.run_dir)
    assert {name: status[name] for name in ("state", "error", "signal") if name in status} == ended


def fail_to_write(_: Path) -> None:
    raise OSError("no space left on device")


def test_a_trainer_that_cannot_be_created_or_closed_is_recorded_as_failed(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    missing = settings_of_kind("sft", tiny_checkpoint, tmp_path, {"train_dataset.path": "missing.jsonl"})
    with pytest.raises(UsageError, match=r"missing\.jsonl"):
        trainer_of(missing)
    assert "missing.jsonl" in read_status(ExperimentFolders.of(missing).run_dir)["error"]
    trainer = trainer_of(settings_of_kind("sft", tiny_checkpoint, tmp_path, {"trial_name": "other"}))
    trainer.saver.save("default", StepInfo(0, 0, 0, 1, 1), fail_to_write, stage=lambda: fail_to_write)
    with pytest.raises(CheckpointError), trainer:
        pass
    assert "no space left" in read_status(trainer.run_dir)["error"]


def test_constant_rewards_cause_a_warning_that_names_settings(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"reward.fn": "tests.experiments.plain_rewards.nothing", "total_train_steps": 6, "total_train_epochs": 9}
    caplog.set_level("INFO", logger="areno")
    with InProcessTrainer(settings_of_kind("rl", tiny_checkpoint, tmp_path, changes)) as trainer:
        trainer.train()
    (warning,) = [record.getMessage() for record in caplog.records if "nothing can be learned" in record.getMessage()]
    assert "step 4: all rewards are 0 for 5 steps" in warning
    assert "first raise gconfig.max_new_tokens" in warning
    assert "--" not in warning
