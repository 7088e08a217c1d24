"""Folders to build in: gone afterwards, and cleared away where a kill left them."""

from __future__ import annotations

import os
import time

import pytest

from areno.cache_folder import building_folder


def test_it_lies_beside_its_target_and_is_gone_afterwards(tmp_path):
    target = tmp_path / "kind" / "step.pt2"
    with building_folder(target) as folder:
        assert folder.parent == target.parent
        (folder / "made").write_text("x")
        os.replace(folder / "made", target)
    assert os.listdir(target.parent) == ["step.pt2"]
    with pytest.raises(KeyError), building_folder(target):
        raise KeyError
    assert os.listdir(target.parent) == ["step.pt2"]


def test_what_killed_builds_left_a_day_ago_is_cleared_away_and_running_ones_stay(tmp_path):
    for name, age_s in (("old", 25 * 3600), ("new", 3600)):
        folder = tmp_path / f".building-{name}"
        folder.mkdir()
        (folder / "part").write_text("x")
        os.utime(folder, (time.time() - age_s,) * 2)
    (tmp_path / "kept.so").write_text("x")
    with building_folder(tmp_path / "another.so"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".building-new", "kept.so"]
