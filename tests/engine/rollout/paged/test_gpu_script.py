"""``benchmarks/gpu.sh`` without a GPU: every part runs and is right, and a part that fails stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parents[4]
PARTS = ("kernel", "correctness", "rollout", "train", "memory")


def run(out, *options, **environment):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    command = ["bash", str(REPO / "benchmarks" / "gpu.sh"), str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)


@pytest.mark.long
def test_every_part_runs_on_a_cpu_in_under_two_minutes(tmp_path):
    began = time.monotonic()
    done = run(tmp_path, "--device", "cpu", "--tiny")
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout[-4000:]
    reports = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PARTS}
    assert all(report["ok"] and "error" not in report for report in reports.values())
    assert all(len(report["checks"]) >= 2 for report in reports.values())
    assert reports["rollout"]["graphs"]["tokens_per_s"] > 0
    assert took < 120


def test_failing_parts_are_counted_and_each_leaves_a_file(tmp_path):
    """The interpreter is one that fails at once."""
    done = run(tmp_path, PYTHON="false")
    assert done.returncode == len(PARTS)
    assert {json.loads((tmp_path / f"{name}.json").read_text())["ok"] for name in PARTS} == {False}


def test_without_a_folder_it_says_how_it_is_called():
    done = subprocess.run(["bash", str(REPO / "benchmarks" / "gpu.sh")], capture_output=True, text=True)
    assert done.returncode == 64
    assert "usage" in done.stderr
