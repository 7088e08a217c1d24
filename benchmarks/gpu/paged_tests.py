"""The tests of paged decoding, on this machine's versions of PyTorch and Triton."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

from shared import ROOT, Checks, Report, run_stage

FOLDER = "tests/engine/rollout/paged"


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    if importlib.util.find_spec("pytest") is None:
        report["skipped"] = "pytest is not installed"
        return
    chosen = [f"{FOLDER}/test_pages.py"] if args.tiny else [FOLDER, "--ignore", f"{FOLDER}/test_gpu_script.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", *chosen]
    log = args.out / "paged_tests.txt"
    with log.open("w") as out:  # whoever is killed leaves what was written
        done = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "4"}
        )
    lines = log.read_text().splitlines()
    report["last lines"] = lines[-30:]
    checks.below("status of pytest", done.returncode, 0)


if __name__ == "__main__":
    run_stage("paged_tests", stage)
