"""How long a YAML experiment takes until its first log line, and until an error about its settings.

    python benchmarks/experiment_start.py             # table, then one line of JSON
    python benchmarks/experiment_start.py --save NAME

Each measurement is a fresh process; ``train.py``, ``areno run`` and ``main_async_ppo.py`` are interleaved. The clock starts
before the process does. ``first_log_s`` ends with the first line that the logger prints, ``error_s`` with the exit of a process
that has an unknown setting.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, finish, machine, median

sys.path.insert(0, str(ROOT / "examples" / "experiments"))
LOG_LINE = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ areno\.", re.MULTILINE)


def commands(folder: Path) -> dict[str, list[str]]:
    """Each entry point, with settings of the toy."""
    example = ROOT / "examples/experiments/grpo.yaml"
    shared = [f"cluster.fileroot={folder / 'runs'}", f"actor.path={folder / 'toy/model'}"]
    data = [f"{name}_dataset.path={folder}/toy/{name}.jsonl" for name in ("train", "valid")]
    yaml = ["--config", str(example), "actor.lr=1e-4", "seed=42", *shared, *data]
    legacy = [*shared, f"dataset.path={folder}/toy/train.jsonl", "dataset.train_bs_n_seqs=8", "group_size=4"]
    return {
        "train.py": [str(ROOT / "examples/experiments/train.py"), *yaml],
        "areno run": ["-m", "areno", "run", *yaml],
        "main_async_ppo.py": [str(ROOT / "training/main_async_ppo.py"), *legacy],
    }


def start(command: list[str], number: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command, f"trial_name=t{number}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def first_log_s(command: list[str], number: int) -> float:
    """Seconds to the first log line, after which the run is killed."""
    began = time.perf_counter()
    with start(command, number) as process:
        assert process.stdout is not None
        seen = b""
        while not LOG_LINE.search(seen):
            more = os.read(process.stdout.fileno(), 65536)
            if not more:
                raise SystemExit(f"{' '.join(command)} ended without a log line:\n{seen.decode()}")
            seen += more
        seconds = time.perf_counter() - began
        os.killpg(process.pid, signal.SIGKILL)
    return seconds


def error_s(command: list[str], number: int) -> float:
    """Seconds until a process with an unknown setting exits."""
    began = time.perf_counter()
    with start([*command, "actor.optimizer.lr=1"], number) as process:
        output = process.communicate()[0]
        seconds = time.perf_counter() - began
    if process.returncode == 0 or b"actor.optimizer" not in output:
        raise SystemExit(f"{' '.join(command)} did not refuse an unknown setting:\n{output.decode()}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "experiment_start", "machine": machine(), "repeats": args.repeats}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from toy import make_toy

        make_toy(folder / "toy", 64)
        measured: dict[str, dict[str, list[float]]] = {
            entry: {"first_log_s": [], "error_s": []} for entry in commands(folder)
        }
        for number in range(args.repeats):
            for entry, command in commands(folder).items():
                measured[entry]["first_log_s"].append(first_log_s(command, number))
                measured[entry]["error_s"].append(error_s(command, number))
    result["entries"] = {
        entry: {kind: median(times) for kind, times in kinds.items()} for entry, kinds in measured.items()
    }
    for entry, kinds in result["entries"].items():
        print(f"{entry:<20} first log line {kinds['first_log_s']:>7.3f} s   error {kinds['error_s']:>7.3f} s")
    finish(result, args.save)


if __name__ == "__main__":
    main()
