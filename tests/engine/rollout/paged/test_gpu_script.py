"""``benchmarks/gpu.sh`` without a GPU: each stage runs and passes, and one that fails or is killed does not stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[4]
SCRIPT = REPO / "benchmarks" / "gpu.sh"
STAGES = ("capture", "kernel", "correctness", "rollout", "train", "memory", "top_p", "paged_tests", "cycle")
# Packages that a bare machine may lack and that no stage may need.
ABSENT = ("datasets", "omegaconf", "fastapi", "uvicorn")

BARE = f"""
import argparse, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, "benchmarks/gpu")
import shared
stages = {{name: __import__(name).stage for name in {STAGES}}}
args = argparse.Namespace(out=Path(sys.argv[1]), device="cpu", tiny=True)
for name in ("capture", "cycle"):
    report = shared.Report(args.out / f"{{name}}.json", machine=shared.machine("cpu"))
    checks = shared.Checks(report)
    stages[name](args, checks, report)
    assert "errors" not in report and not checks.failed, report
assert not set(sys.modules) & set({ABSENT})
"""


def run(out, *options, **environment):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    command = ["bash", str(SCRIPT), str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)


@pytest.mark.long
def test_every_stage_runs_on_a_cpu(tmp_path):
    done = run(tmp_path, "--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stdout[-4000:]
    reports = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in STAGES}
    assert all(report["ok"] and report["finished"] and "error" not in report for report in reports.values())
    assert all(report["checks"] or name == "top_p" for name, report in reports.items())
    assert reports["rollout"]["prefill 8192: tokens per s"] > 0


@pytest.mark.long
def test_stages_start_and_run_without_the_packages_that_a_bare_machine_lacks(tmp_path):
    """All are imported in one process and two of them run: a rollout, and an engine that generates and trains in turn."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    phases = json.loads((tmp_path / "cycle.json").read_text())["phases"]
    assert [phase["cycle"] for phase in phases] == ["cache kept"] * 5 + ["cache dropped"] * 5


def test_every_measurement_is_written_to_the_file_at_once(tmp_path):
    """A killed stage keeps what it measured."""
    code = """
import os, sys
sys.path.insert(0, "benchmarks/gpu")
from pathlib import Path
import shared
report = shared.Report(Path(sys.argv[1]) / "one.json", ok=False)
checks = shared.Checks(report)
report.add("table", {"us": 5})
checks.below("a figure", 2, 1)
os.kill(os.getpid(), 9)
"""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPO, env=env, timeout=120, capture_output=True)
    check = {"check": "a figure", "value": 2, "bound": 1, "ok": False}
    assert json.loads((tmp_path / "one.json").read_text()) == {"ok": False, "table": [{"us": 5}], "checks": [check]}


def test_failing_stages_are_counted_and_each_leaves_a_file(tmp_path):
    """``false`` as the interpreter fails at once."""
    assert run(tmp_path, PYTHON="false").returncode == len(STAGES)
    assert {json.loads((tmp_path / f"{name}.json").read_text())["ok"] for name in STAGES} == {False}


def test_chosen_stages_run_in_the_order_of_the_script(tmp_path):
    done = run(tmp_path, "rollout", "--tiny", "capture", PYTHON="false")
    assert done.returncode == 2
    assert [line.split()[1] for line in done.stdout.splitlines() if "at most" in line] == ["capture", "rollout"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["capture.json", "log.txt", "rollout.json"]


def test_every_listed_stage_has_a_limit_under_eight_minutes():
    done = subprocess.run(["bash", str(SCRIPT), "--list"], capture_output=True, text=True)
    listed = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in listed] == [*STAGES, "server", "layouts"]  # the last two run only if named
    assert all(int(limit) < 480 for _, limit in listed)


@pytest.mark.parametrize("arguments", [(), ("--tiny",), ("OUT", "nonsense")])
def test_a_wrong_call_prints_the_usage(arguments, tmp_path):
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 64
    assert "usage" in done.stderr
