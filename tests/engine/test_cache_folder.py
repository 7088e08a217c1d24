"""Build and scratch folders are removed afterwards, and later if a kill left them behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from areno.cache_folder import ScratchFolder, building_folder, cache_folder, planted_problem


def test_a_building_folder_is_next_to_its_target_and_removed_afterwards(tmp_path):
    target = tmp_path / "kind" / "step.pt2"
    with building_folder(target) as folder:
        assert folder.parent == target.parent
        (folder / "made").write_text("x")
        os.replace(folder / "made", target)
    assert os.listdir(target.parent) == ["step.pt2"]
    with pytest.raises(KeyError), building_folder(target):
        raise KeyError
    assert os.listdir(target.parent) == ["step.pt2"]


def test_folders_that_killed_builds_left_a_day_ago_are_removed_and_newer_ones_stay(tmp_path):
    for name, age_s in (("old", 25 * 3600), ("new", 3600)):
        folder = tmp_path / f".building-{name}"
        folder.mkdir()
        (folder / "part").write_text("x")
        os.utime(folder, (time.time() - age_s,) * 2)
    (tmp_path / "kept.so").write_text("x")
    with building_folder(tmp_path / "another.so"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".building-new", "kept.so"]


HOLDER = """
import time
from pathlib import Path
from areno.cache_folder import ScratchFolder
folder = ScratchFolder("test")
print(folder.name, flush=True)
time.sleep(60)
"""


def test_a_scratch_folder_is_removed_by_the_next_one_only_after_its_owner_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    left = Path(owner.stdout.readline().strip())
    foreign = tmp_path / "areno-scratch-weights-without-a-lock"
    foreign.mkdir()
    for folder in (left, foreign):
        os.utime(folder, (time.time() - 3600,) * 2)
    mine = ScratchFolder("test")
    assert left.parent == tmp_path
    assert left.exists()
    owner.kill()
    owner.communicate()
    os.utime(mine.name, (time.time() - 3600,) * 2)
    with ScratchFolder("test") as name:
        assert sorted(os.listdir(tmp_path)) == sorted(
            [foreign.name, os.path.basename(mine.name), os.path.basename(name)]
        )
    mine.cleanup()
    assert os.listdir(tmp_path) == [foreign.name]


@pytest.mark.parametrize("place", [".", "kernels", "kernels/step.so"])
@pytest.mark.parametrize("how", ["another's", "everybody's"])
def test_machine_code_that_another_user_may_have_written_is_reported(tmp_path, monkeypatch, place, how):
    if how == "another's" and os.geteuid():
        pytest.skip("only root can give files away")
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "cache"))
    cached = cache_folder("kernels") / "step.so"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"")
    assert planted_problem(cached) == ""
    if how == "another's":
        os.chown(tmp_path / "cache" / place, 12345, 12345)
        assert "is owned by user 12345" in planted_problem(cached)
    else:
        (tmp_path / "cache" / place).chmod(0o777)
        assert "is world-writable" in planted_problem(cached)
