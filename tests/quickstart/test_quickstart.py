"""``areno quickstart``: a shortened run, and the full one with three seeds as a long test."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno.api.trainers.supervised import SFTDatasetTrainer
from areno.cli.main import main
from areno.config.prepare import prepare_run
from areno.quickstart import from_scratch as quickstart_run
from areno.quickstart.task import HELD_OUT_ONE_IN, WORDINGS, Problem, draw_problems
from tests.support.cli import environment

SUM = re.compile(r"(\d+) \+ (\d+)")


def printed_commands(text: str) -> list[list[str]]:
    """Arguments of every ``$ areno train`` that a quickstart printed, with continuation lines joined."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line.partition("$ areno train")[2]) for line in joined.splitlines() if "$ areno train" in line]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A quickstart of a few steps in a folder whose name needs quoting; returns the folder and what was printed."""
    root = tmp_path_factory.mktemp("quick") / "my first run"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(quickstart_run, "HELD_OUT", 12)
        patch.setattr(quickstart_run, "SFT_STEPS", 6)
        patch.setitem(quickstart_run._SFT, "--max-steps", 6)
        patch.setitem(quickstart_run._GSPO, "--max-steps", 2)
        patch.setitem(quickstart_run._GSPO, "--n-samples", 2)
        assert main(["quickstart", "--seed", "3", "--run-dir", str(root)]) == 0
    return root, printed.getvalue()


def test_the_summary_reports_the_accuracy_and_how_it_was_reached(short_run):
    root, printed = short_run
    summary = json.loads((root / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds", "seed", "steps"} <= set(summary)
    assert summary["seed"] == 3
    assert Path(summary["checkpoint"]).is_dir()
    assert f"{summary['accuracy_after']:.1%} after GSPO" in printed
    assert summary["checkpoint"] in printed
    assert "tensorboard --logdir" in printed
    assert "mean reward of each GSPO step" in printed


def test_the_printed_commands_are_those_of_the_runs(short_run, tmp_path):
    root, printed = short_run
    commands = printed_commands(printed)
    assert len(commands) == 2
    for algo, argv in zip(("sft", "gspo"), commands, strict=True):
        place = argv.index("--run-dir") + 1
        assert argv[place] == str(root / algo)
        argv[place] = str(tmp_path / algo)
        options = prepare_run(argv).options
        stored = yaml.safe_load((root / algo / "config.yaml").read_text())
        again = {name: getattr(options, name) for name in stored}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in again.items()}
        assert listed == stored


def test_held_out_problems_are_in_no_data_file(short_run):
    root, _ = short_run
    assert_nothing_held_out_is_trained_on(root)


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["quickstart", "--run-dir", str(tmp_path)]) == 2
    assert "the folder is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("more", [[], ["--real", "--ckpt", "./gone"]])
@pytest.mark.parametrize("place", ["notes.txt", "notes.txt/run"])
def test_a_folder_that_cannot_be_created_is_refused_before_a_model_is_read(tmp_path, capsys, more, place):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["quickstart", "--run-dir", str(tmp_path / place), *more]) == 2
    error = capsys.readouterr().err
    assert f"--run-dir {tmp_path / place}: {tmp_path / 'notes.txt'} is a file; choose a directory" in error


def assert_nothing_held_out_is_trained_on(root):
    files = sorted((root / "data").glob("*.jsonl"))
    assert [path.name for path in files] == ["gspo.jsonl", "sft.jsonl"]
    for path in files:
        for row in rows_of(path):
            a, b = map(int, SUM.search(row["prompt"]).groups())
            assert not Problem(a, b, "").held_out
    assert HELD_OUT_ONE_IN == 20


def plain_accuracy(checkpoint: str, problems: list[Problem]) -> float:
    """Greedy accuracy, one question at a time, without areno."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    right = 0
    for problem in problems:
        chat = [{"role": "user", "content": problem.question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            output = model.generate(ids, do_sample=False, max_new_tokens=40)
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        right += re.findall(r"Answer: (\d+)$", text.strip()) == [str(problem.a + problem.b)]
    return right / len(problems)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_quickstart_teaches_the_model_within_three_minutes(seed, tmp_path):
    root = tmp_path / "run"
    command = [sys.executable, "-m", "areno", "quickstart", "--seed", str(seed), "--run-dir", str(root)]
    # Two threads, as on the two cores that the quickstart is made for.
    env = {**environment(), "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((root / "summary.json").read_text())
    assert summary["seed"] == seed
    assert 0.15 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.4
    assert summary["seconds"] < 180
    held_out = draw_problems(12345, 400, held_out=True)
    assert plain_accuracy(summary["checkpoint"], held_out) == pytest.approx(summary["accuracy_after"], abs=1e-9)
    assert_nothing_held_out_is_trained_on(root)
    trained = {row["prompt"] for path in (root / "data").glob("*.jsonl") for row in rows_of(path)}
    assert not trained & {w.format(a=p.a, b=p.b) for p in held_out for w in WORDINGS}


def test_a_stopped_run_stops_the_quickstart(tmp_path, monkeypatch):
    """SIGINT in the SFT phase: no GSPO on a half-trained model, and the exit code of ``areno train``."""
    step = SFTDatasetTrainer.run_step
    monkeypatch.setattr(SFTDatasetTrainer, "run_step", lambda *args: signal.raise_signal(signal.SIGINT) or step(*args))
    monkeypatch.setattr(quickstart_run, "HELD_OUT", 4)
    assert main(["quickstart", "--run-dir", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run" / "gspo").exists()
