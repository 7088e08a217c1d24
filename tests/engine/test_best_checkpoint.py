"""The best checkpoint: complete or absent, never lost, and not a second copy where hard links suffice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from areno.errors import CheckpointError
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.contents import read_state, write_state


def fill(path, step):
    (path / "model").write_text(str(step) * 1000)
    write_state(path, {"step": step})


def save(folder, step):
    with folder.writing(step, 10) as path:
        fill(path, step)


def save_best(folder, step):
    with folder.writing_best(10) as path:
        fill(path, step)


def test_the_best_checkpoint_is_replaced_and_kept_besides_the_newest(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.best_step() is None
    save_best(folder, 1)
    save_best(folder, 2)
    for step in (3, 4):
        save(folder, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step_000004"]
    assert folder.best_step() == 2
    assert (folder.best / "model").read_text() == "2" * 1000


def test_a_run_resumes_from_the_best_checkpoint_if_it_is_the_newest(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_best(folder, 2)
    assert folder.latest() == folder.best
    save(folder, 1)
    assert folder.latest() == folder.best
    save(folder, 2)
    assert folder.latest() == folder.path(2)


def test_a_checkpoint_of_a_step_is_found_among_the_newest_or_as_the_best(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    save_best(folder, 2)
    assert [folder.find(step) for step in (1, 2, 3)] == [folder.path(1), folder.best, None]


def test_two_checkpoints_of_a_step_share_their_files_and_not_their_state(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 5)
    with folder.writing_best(0, copy_of=folder.path(5)) as path:
        write_state(path, {"step": 5, "note": "best"})
    assert os.path.samefile(folder.best / "model", folder.path(5) / "model")
    assert (read_state(folder.path(5)), read_state(folder.best)) == ({"step": 5}, {"step": 5, "note": "best"})


def test_files_are_copied_if_the_file_system_has_no_hard_links(tmp_path, monkeypatch):
    # No file system without hard links can be mounted here.
    def refuse(source, target):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", refuse)
    folder = CheckpointFolder(tmp_path)
    save_best(folder, 5)
    with folder.writing(5, 0, copy_of=folder.best) as path:
        write_state(path, {"step": 5})
    assert (folder.path(5) / "model").read_text() == "5" * 1000
    assert not os.path.samefile(folder.best / "model", folder.path(5) / "model")


def test_an_error_while_writing_leaves_the_old_best_alone(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_best(folder, 1)
    with pytest.raises(CheckpointError, match="best"), folder.writing_best(10) as path:
        (path / "model").write_text("half")
        raise OSError("no space left on device")
    assert folder.best_step() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_the_old_best_is_restored_after_a_kill_during_its_replacement(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_best(folder, 1)
    os.replace(folder.best, tmp_path / ".replaced-best")  # the first of the two renames of a replacement
    folder.clear_leftovers()
    assert folder.best_step() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


WRITER = """
import sys
from areno.storage.contents import write_state
from areno.storage.checkpoint_folder import CheckpointFolder
folder = CheckpointFolder(sys.argv[1], keep=1)
step = 0
while True:
    step += 1
    with folder.writing(step, 10) as path:
        for part in range(5):
            (path / f"part{part}").write_text(str(step) * 1000)
        write_state(path, {"step": step})
    with folder.writing_best(0, copy_of=folder.path(step)) as path:
        write_state(path, {"step": step})
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_complete_best_checkpoint(tmp_path):
    rng = random.Random(0)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        folder = CheckpointFolder(tmp_path, keep=1)
        folder.clear_leftovers()
        step = folder.best_step()
        assert step is not None
        assert all((folder.best / f"part{part}").read_text() == str(step) * 1000 for part in range(5))


def test_a_damaged_best_checkpoint_is_skipped_and_set_aside(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    save_best(folder, 2)
    (folder.best / "model").write_text("x")
    assert folder.to_resume() == folder.path(1)
    assert (folder.best_step(), folder.latest()) == (None, folder.path(1))
    assert (tmp_path / ".damaged-best" / "model").read_text() == "x"


def test_hard_linked_copies_are_verified_with_the_same_checksums(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 5)
    with folder.writing_best(0, copy_of=folder.path(5)) as path:
        write_state(path, {"step": 5})
    assert folder.to_resume() == folder.path(5)
    (folder.path(5) / "model").write_text("x")  # both have this file
    with pytest.raises(CheckpointError, match=r"step_000005/model has 1 bytes.*best/model has 1 bytes"):
        folder.to_resume()
