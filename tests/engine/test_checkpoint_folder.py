"""Checkpoints are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.errors import CheckpointError
from areno.storage import checkpoint_folder as folder_module
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.contents import read_state, write_state
from areno.training import plain_objects
from tests.support.limits import file_size_limit


def save(folder, step, text="weights"):
    with folder.writing(step, 10) as path:
        (path / "model").write_text(text)
        write_state(path, {"step": step})


def test_checkpoints_are_found_in_order_and_old_ones_go(tmp_path):
    folder = CheckpointFolder(tmp_path / "deep" / "root", keep=2)
    assert folder.latest() is None
    for step in (5, 10, 15):
        save(folder, step)
    assert folder.steps() == [10, 15]
    assert folder.latest().name == "step_000015"
    assert read_state(folder.latest()) == {"step": 15}


def test_an_error_while_writing_leaves_the_last_checkpoint_alone(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1, "first")
    with pytest.raises(CheckpointError, match="step_000001"), folder.writing(1, 10) as path:
        (path / "model").write_text("half")
        raise OSError("no space left on device")
    assert (folder.path(1) / "model").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_file({"weight": torch.ones(50_000)}, path / "model.safetensors"),
        lambda path: plain_objects.save({"rows": torch.ones(50_000)}, path / "rollout.pt"),
    ],
)
def test_a_full_disk_is_a_checkpoint_error_whichever_library_writes(write, tmp_path):
    """A limit of the size of files fails in the same place as a full disk."""
    folder = CheckpointFolder(tmp_path)
    with (
        file_size_limit(10_000),
        pytest.raises(CheckpointError, match="step_000001 failed"),
        folder.writing(1, 10) as path,
    ):
        write(path)
    assert list(tmp_path.iterdir()) == []


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_checkpoint_error(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 1)
    (tmp_path / ".trash-step_000001").symlink_to("elsewhere")  # a folder does not replace a link
    with pytest.raises(CheckpointError, match="step_000001 cannot be deleted"):
        save(folder, 2)


def test_the_same_step_may_be_saved_again(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1, "first")
    save(folder, 1, "second")
    assert (folder.path(1) / "model").read_text() == "second"


def test_a_folder_without_state_is_not_a_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.path(3).mkdir()
    (tmp_path / "notes").mkdir()
    assert folder.steps() == []


def test_too_little_disk_space_is_reported_before_anything_is_written(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"MiB free.*--keep-checkpoints"), folder.writing(1, 10**18):
        raise AssertionError("must not be reached")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_state_is_named(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    (folder.path(1) / "trainer_state" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(folder.path(1))


WRITER = """
import sys
from areno.storage.contents import write_state
from areno.storage.checkpoint_folder import CheckpointFolder
folder = CheckpointFolder(sys.argv[1], keep=2)
step = 0
while True:
    step += 1
    with folder.writing(step, 10) as path:
        for part in range(5):
            (path / f"part{part}").write_text(str(step) * 1000)
        write_state(path, {"step": step})
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_only_complete_checkpoints(tmp_path):
    rng = random.Random(0)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        folder = CheckpointFolder(tmp_path, keep=2)
        assert folder.steps()
        for step in folder.steps():
            assert read_state(folder.path(step)) == {"step": step}
            assert all((folder.path(step) / f"part{p}").read_text() == str(step) * 1000 for p in range(5))
        folder.clear_leftovers()
        assert all(name.startswith("step_") for name in os.listdir(tmp_path))
        for step in folder.steps():
            folder.remove(step)


def test_everything_is_flushed_to_disk_before_a_checkpoint_is_renamed(tmp_path, monkeypatch):
    flushed, fsync, replace = set(), os.fsync, os.replace

    def noted(descriptor):
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def checked(source, target):
        if Path(target).name == "step_000001":
            below = [Path(source), *Path(source).rglob("*")]
            assert len(below) == 5  # with the model, and a folder that holds state and manifest
            assert {path.stat().st_ino for path in below} <= flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked)
    save(CheckpointFolder(tmp_path), 1)
    assert tmp_path.stat().st_ino in flushed


def test_random_state_comes_back():

    import numpy as np
    import torch

    def draw():  # normal numbers come in pairs, of which one may be left over
        return random.gauss(0, 1), np.random.randn(), random.random(), np.random.rand(), torch.rand(3).tolist()

    draw()
    state = json.loads(json.dumps(capture_rng()))
    drawn = draw()
    restore_rng(state)
    assert draw() == drawn


def test_leftover_names_are_hidden():
    assert folder_module._PARTIAL.startswith(".")
    assert folder_module._REPLACED.startswith(".")
    assert folder_module._TRASH.startswith(".")


@pytest.mark.parametrize("calls", range(1, 9))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path, calls):
    """The process is killed at each of its renames and deletions in turn; the only checkpoint is never lost."""
    folder = CheckpointFolder(tmp_path)
    save(folder, 1, "first")
    child = os.fork()
    if child == 0:
        left = [calls]

        def or_die(function):
            def counted(*arguments, **options):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return counted

        os.replace, os.unlink, os.rmdir = map(or_die, (os.replace, os.unlink, os.rmdir))
        try:
            save(folder, 1, "second")
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL
    folder.clear_leftovers()
    assert folder.steps() == [1]
    assert (folder.path(1) / "model").read_text() in ("first", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES = {
    "flipped": lambda checkpoint: change(checkpoint / "model", "w", "v"),
    "short": lambda checkpoint: os.truncate(checkpoint / "model", 3),
    "missing": lambda checkpoint: (checkpoint / "model").unlink(),
    "state changed": lambda checkpoint: change(checkpoint / "trainer_state/state.json", '"step": 3', '"step": 2'),
    "state missing": lambda checkpoint: (checkpoint / "trainer_state/state.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_resumed(tmp_path, damage, caplog):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    DAMAGES[damage](folder.path(3))
    assert folder.to_resume() == folder.path(2)
    assert names(tmp_path) == [".damaged-step_000003", "step_000001", "step_000002"]
    assert "step_000003 is damaged" in caplog.text
    folder.clear_leftovers()
    assert (tmp_path / ".damaged-step_000003").is_dir()


def test_the_checksum_of_a_file_is_its_sha_256(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1, "abc")  # FIPS 180-2, appendix B.1
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    manifest = json.loads((folder.path(1) / "trainer_state" / "manifest.json").read_text())
    assert manifest == {"files": {"model": {"bytes": 3, "sha256": known}}}


def test_a_step_can_be_chosen_and_a_damaged_one_is_not_replaced_by_another(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    assert folder.to_resume(2) == folder.path(2)
    os.truncate(folder.path(2) / "model", 0)
    with pytest.raises(CheckpointError, match=r"step_000002/model has 0 bytes.*choose another --resume-step"):
        folder.to_resume(2)
    assert folder.steps() == [1, 2, 3]


def test_a_run_does_not_restart_if_all_checkpoints_are_damaged(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.to_resume() is None
    save(folder, 1)
    os.truncate(folder.path(1) / "model", 0)
    with pytest.raises(CheckpointError, match=r"no checkpoint under .* can be used"):
        folder.to_resume()
    assert folder.steps() == [1]


def test_a_checkpoint_without_a_manifest_is_resumed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    (folder.path(1) / "trainer_state" / "manifest.json").unlink()
    (folder.path(1) / "trainer_state" / "state.json").write_text('{"step": 1}')
    assert folder.to_resume() == folder.path(1)


def test_rewinding_hides_the_checkpoints_of_later_steps(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    folder.rewind(1)
    assert folder.latest() == folder.path(1)
    assert names(tmp_path) == [".rewound-step_000002", ".rewound-step_000003", "step_000001"]


@pytest.mark.parametrize(("sound_until", "kept"), [(None, [5, 6]), (0, [5, 6]), (3, [3, 5, 6]), (9, [5, 6])])
def test_the_last_sound_checkpoint_is_kept_besides_the_newest(tmp_path, sound_until, kept):
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.sound_until = sound_until
    for step in range(1, 7):
        save(folder, step)
    assert folder.steps() == kept


def test_a_checkpoint_of_another_format_is_refused_and_keeps_its_name(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    monkeypatch.setattr("areno.storage.contents.FORMAT", 2)
    save(folder, 2)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=r"step_000002 has format 2.*reads format 1; resume the run with the version"
    ):
        folder.to_resume()
    assert folder.steps() == [1, 2]
    assert folder.to_resume(step=1) == folder.path(1)
