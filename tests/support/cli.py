"""Running the real command line in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REWARD = '''
def reward_fn(record):
    """Share of even digits: dense enough that a random model has a signal."""
    digits = [c for c in record.completion if c.isdigit()]
    return sum(int(c) % 2 == 0 for c in digits) / (1 + len(record.completion))
'''
LOADER = "def load_training_dataset(path, *, default_loader, **_):\n    return default_loader(path)\n"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def areno(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run ``areno`` to its end."""
    command = [sys.executable, "-m", "areno", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start ``areno`` in the background; its output goes to a pipe."""
    command = [sys.executable, "-m", "areno", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())


def write_task(folder: Path, rows: int = 60) -> dict[str, Path]:
    """A data file, a loader and a reward for a tiny run."""
    folder.mkdir(parents=True, exist_ok=True)
    data = [
        {"prompt": f"What is {a} plus {b}?", "response": f"The answer is {a + b}.", "solutions": [str(a + b)]}
        for a in range(30)
        for b in range(30)
    ][:rows]
    paths = {name: folder / name for name in ("data.jsonl", "loader.py", "reward.py")}
    paths["data.jsonl"].write_text("\n".join(map(json.dumps, data)))
    paths["loader.py"].write_text(LOADER)
    paths["reward.py"].write_text(REWARD)
    return paths


def task_arguments(algo: str, checkpoint: Path, task: dict[str, Path], run_dir: Path) -> list[object]:
    """Options of a tiny run of an algorithm."""
    shared: list[object] = ["train", "--algo", algo, "--ckpt", checkpoint, "--dataset-path", task["data.jsonl"]]
    shared += ["--run-dir", run_dir, "--batch-size", 6, "--mini-bs", 8, "--max-new-tokens", 12, "--lr", "1e-3"]
    if algo == "sft":
        return [*shared, "--dataset-loader-fn", task["loader.py"]]
    return [*shared, "--reward-fn-path", task["reward.py"], "--n-samples", 4]


def wait_for_text(process: subprocess.Popen[str], text: str, timeout: float = 120) -> list[str]:
    """Read a process's output until a line holds ``text``."""
    lines: list[str] = []
    deadline = time.monotonic() + timeout
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line or time.monotonic() > deadline:
            break
    assert any(text in line for line in lines), "".join(lines)
    return lines


def kill(process: subprocess.Popen[str], signum: int = signal.SIGKILL) -> int:
    """Send a signal and wait for the end."""
    process.send_signal(signum)
    process.communicate(timeout=60)
    return process.returncode
