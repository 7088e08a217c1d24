"""What a run saves, and how it resumes: in this process, with a tiny real model."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from areno.cli.main import main
from areno.storage.run_lock import run_lock
from tests.support.cli import task_arguments, write_task


@pytest.fixture
def train(tmp_path, tiny_checkpoint):
    """Runs ``areno train`` on SFT rows in ``tmp_path / "run"``; returns the exit code."""
    task = write_task(tmp_path / "task", rows=18)

    def call(*more):
        return main([str(word) for word in (*task_arguments("sft", tiny_checkpoint, task, tmp_path / "run"), *more)])

    return call


def resume(run, *more):
    return main(["train", "--resume", str(run), *map(str, more)])


def weights(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    return {
        name: tensor.clone() for name, tensor in tensors.items()
    }  # copies, because a test may damage the mapped file


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_or_from_a_chosen_one(tmp_path, train, capsys):
    run = tmp_path / "run"
    saved = run / "checkpoints"
    assert train("--max-steps", 4, "--save-interval", 1) == 0
    whole = weights(saved / "step_000004")
    for name in ("model.safetensors", "trainer_state/optimizer/shard-00001-model-00001-of-00001.safetensors"):
        flip(saved / "step_000004" / name)
        assert resume(run) == 0
        assert "step_000004 is damaged" in capsys.readouterr().err
        assert same(weights(saved / "step_000004"), whole)  # retrained to the same weights
    assert resume(run, "--resume-step", 2, "--max-steps", 3) == 0
    assert steps(run) == [0, 1, 2]
    assert same(weights(saved / ".rewound-step_000004"), whole)
    capsys.readouterr()
    assert resume(run, "--resume-step", 4) == 2
    assert "--resume-step 4" in (error := capsys.readouterr().err)
    assert "choose one of 1, 2, 3" in error


def test_the_last_checkpoint_before_the_first_skipped_update_survives_rotation(tmp_path, train):
    run = tmp_path / "run"
    train("--lr", 1e15, "--epochs", 9, "--save-interval", 1, "--keep-checkpoints", 2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line["step"] for line in lines if line["train/update_skipped"])
    saved = sorted(int(path.name[-6:]) for path in (run / "checkpoints").iterdir())
    assert first >= 1
    assert saved == [first, lines[-1]["step"], lines[-1]["step"] + 1]


def test_a_run_that_another_process_writes_to_is_neither_resumed_nor_changed(tmp_path, train, capsys):
    run = tmp_path / "run"
    assert train("--max-steps", 1) == 0
    before = (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    with run_lock(run, ""):
        assert resume(run, "--max-steps", 2) == 2
    assert f"process {os.getpid()} on" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before


def test_two_runs_cannot_share_a_folder_of_checkpoints_or_events(tmp_path, train, capsys):
    for option in ("--save-path", "--metrics-log-dir"):
        place = tmp_path / option
        with run_lock(place, ""):
            assert train("--max-steps", 1, option, place) == 2
        assert f"choose another {option}" in capsys.readouterr().err


def test_a_run_may_write_everything_into_one_folder(tmp_path, train):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert train("--max-steps", 1, "--save-path", tmp_path / "link", "--metrics-log-dir", tmp_path / "run") == 0
    assert {"step_000001", "metrics.jsonl"} <= {path.name for path in (tmp_path / "run").iterdir()}
    both = tmp_path / "both"
    assert train("--max-steps", 1, "--run-dir", tmp_path / "2", "--save-path", both, "--metrics-log-dir", both) == 0
