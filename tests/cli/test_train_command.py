"""``areno train`` up to the point where it hands over to the engine."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from areno.cli.main import main
from areno.config import TrainOptions
from areno.config.prepare import load_hooks
from areno.errors import ArenoError, UsageError
from tests.config.workspace import GSPO, SFT
from tests.support.cli import task_arguments, write_task


@pytest.fixture
def real_model(workspace, tiny_checkpoint):
    """The workspace with a model that transformers can read."""
    shutil.rmtree(workspace / "model")
    shutil.copytree(tiny_checkpoint, workspace / "model")
    return workspace


def config_part(out):
    return out.split("----------------------\n")[1].split("\nMemory\n")[0]


def printed_config(capsys):
    return config_part(capsys.readouterr().out)


@pytest.mark.parametrize("argv", [GSPO, SFT])
def test_dry_run_prints_summary_config_and_memory_and_runs_nothing(real_model, capsys, argv):
    before = sorted(path.name for path in real_model.iterdir())
    assert main(["train", *argv, "--dry-run", "--lr", "3e-5", "--run-dir", "out"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("AReno training config\n")
    config = yaml.safe_load(config_part(out))
    assert config["lr"] == 3e-5
    assert Path(config["ckpt"]) == real_model / "model"
    assert out.split("\nMemory\n------\n")[1].strip()
    assert sorted(path.name for path in real_model.iterdir() if path.name != "__pycache__") == before


def test_the_printed_config_can_be_used_again(real_model, capsys):
    main(["train", *GSPO, "--dry-run", "--seed", "3"])
    first = printed_config(capsys)
    (real_model / "again.yaml").write_text(first)
    assert main(["train", "--config", "again.yaml", "--dry-run"]) == 0
    assert printed_config(capsys) == first


def test_the_loader_is_loaded_only_if_it_is_set(workspace):
    assert load_hooks(TrainOptions(reward_fn_path="reward.py")) is None
    loader = load_hooks(TrainOptions(dataset_loader_fn="loader.py"))
    assert loader("x", default_loader=str.upper) == "X"


def test_the_reward_file_is_checked_in_another_process(workspace):
    (workspace / "reward.py").write_text(
        "import os\nfrom pathlib import Path\nPath('imported').write_text(str(os.getpid()))\n"
        "def reward_fn(record):\n    return 1\n"
    )
    known = set(sys.modules)
    load_hooks(TrainOptions(reward_fn_path="reward.py"))
    assert int((workspace / "imported").read_text()) != os.getpid()
    assert not [name for name in set(sys.modules) - known if "reward" in name]
    for code in (3, 0):
        (workspace / "reward.py").write_text(
            f"import os\nos._exit({code})\n" + "#" * code
        )  # another size, or the bytecode is reused
        with pytest.raises(
            UsageError,
            match=rf"--reward-fn-path reward\.py: importing the file ended the process with exit code {code}",
        ):
            load_hooks(TrainOptions(reward_fn_path="reward.py"))


def raising(error):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ArenoError("disk full"), 1, "error: disk full\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit("no data"), 1, "error: no data\n"),
        (SystemExit(3), 3, ""),
    ],
)
def test_failures_and_interrupts_have_their_own_exit_codes(monkeypatch, capsys, error, code, message):
    monkeypatch.setattr(importlib.import_module("areno.cli.train"), "run", raising(error))
    assert main(["train"]) == code
    assert capsys.readouterr().err == message


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(importlib.import_module("areno.cli.train"), "run", raising(RuntimeError("defect")))
    with pytest.raises(RuntimeError, match="defect"):
        main(["train"])


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("warning", False)])
def test_the_console_has_lines_of_its_level_and_the_log_file_has_all(tmp_path, tiny_checkpoint, capsys, level, shown):
    words = task_arguments("grpo", tiny_checkpoint, write_task(tmp_path / "task"), tmp_path / "run")
    assert main([*map(str, words), "--max-steps", "1", "--log-level", level]) == 0
    assert ("stage=rollout_start" in capsys.readouterr().err) is shown
    assert "stage=rollout_start" in (tmp_path / "run" / "log.txt").read_text()
    assert "log_level" not in (tmp_path / "run" / "config.yaml").read_text()
