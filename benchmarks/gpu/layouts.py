"""Layouts of a trainer on as many GPUs as there are: time of a step, and memory against the plan; ``benchmarks/layouts.py``."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from shared import Checks, Report, run_stage

import torch

PROGRAM = Path(__file__).resolve().parents[1] / "layouts.py"
RANKS = {
    "one": 1,
    "fsdp:d2": 2,
    "t2": 2,
    "c2": 2,
    "p2": 2,
    "fsdp:d4": 4,
    "fsdp:d2t2": 4,
    "fsdp:d2c2": 4,
    "p4": 4,
    "fsdp:d2p2": 4,
}


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    """Those that there are GPUs for; on a CPU two."""
    gpus = torch.cuda.device_count() if args.device.startswith("cuda") else 2
    names = [name for name, ranks in RANKS.items() if ranks <= gpus][: 2 if args.tiny else None]
    sizes = (
        ["--rows", "8", "--microbatches", "4", "--steps", "1"] if args.tiny else ["--rows", "64", "--length", "2048"]
    )
    command = [sys.executable, str(PROGRAM), "--device", args.device, *sizes, "--only", *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report["layouts"] = json.loads(done.stdout.splitlines()[-1])["layouts"]
    for name, entry in report["layouts"].items():
        checks.below(f"{name}: held over planned", entry["held"] / entry["planned"], 1.15)


if __name__ == "__main__":
    run_stage("layouts", stage)
