"""Running the real command line in its own process, which is forked from one with all imports done."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from areno.launch.local import start_process
from tests.support.preloaded import Forked, ForkedRank, Preloaded

Process = subprocess.Popen[str] | subprocess.Popen[bytes] | Forked
WORKER = "areno.engine.parallel.worker"
_SET_BY_RANKS = frozenset({"PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})

REWARD = '''
def reward_fn(record):
    """Share of even digits: dense enough that a random model has a signal."""
    digits = [c for c in record.completion if c.isdigit()]
    return sum(int(c) % 2 == 0 for c in digits) / (1 + len(record.completion))
'''
LOADER = "def load_training_dataset(path, *, default_loader, **_):\n    return default_loader(path)\n"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


@functools.cache
def preloaded() -> Preloaded:
    """The process from which programs are forked."""
    return Preloaded(environment())


def start_program(words: list[str], variables: dict[str, str], output: int) -> Process | None:
    """Start a module or a file in the background, with ranks that are forked, too; None if that is not possible."""
    if sys.platform != "linux" or not preloaded().fits(variables, ignoring=_SET_BY_RANKS):
        return None
    return Forked(preloaded().fork("tests.support.program", words, variables, output, output))


def start_text(text: str, folder: Path, *arguments: object) -> Process:
    """Write the text of a program to a file in a folder and start it; its output goes to a pipe.

    Its ranks are forked, too, and it can import the test modules.
    """
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    words, variables = [str(file), *map(str, arguments)], environment()
    end, beginning = os.pipe()
    try:
        process: Any = start_program(words, variables, beginning)
        if process is None:
            root = str(Path(__file__).parents[2])
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
            process = subprocess.Popen([sys.executable, *words], stdout=beginning, stderr=beginning, env=variables)
        process.stdout = os.fdopen(end, encoding="utf-8", errors="replace")
        return process  # type: ignore[no-any-return]
    finally:
        os.close(beginning)


def areno(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run ``areno`` to completion."""
    return _completed(timeout, lambda out, err: _start(arguments, out, err, None), ["areno", *map(str, arguments)])


def python(
    program: Path, *arguments: object, folder: Path, timeout: float = 120, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program file to completion, in a folder. A ``fresh`` process has nothing imported."""
    words, variables = [str(each) for each in arguments], environment()
    if fresh or sys.platform != "linux" or not preloaded().fits(variables):
        command = [sys.executable, str(program), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables, cwd=folder)
    return _completed(
        timeout,
        lambda out, err: Forked(preloaded().fork(str(program), words, variables, out, err, folder=str(folder))),
        [str(program), *words],
    )


def _completed(
    timeout: float, begin: Callable[[int, int], Process], named: list[str]
) -> subprocess.CompletedProcess[str]:
    """Start a process with files for its output and its errors, and wait until it ends."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = begin(out.fileno(), err.fileno())
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(named, code, out.read(), err.read())


def start(*arguments: object, fresh: bool = False) -> Process:
    """Start ``areno`` in the background; its output goes to a pipe. A ``fresh`` process has nothing imported."""
    end, beginning = os.pipe()
    try:
        return _start(arguments, beginning, beginning, open(end, encoding="utf-8", errors="replace"), fresh)
    finally:
        os.close(beginning)


def _start(
    arguments: tuple[object, ...], stdout: int, stderr: int, reader: IO[str] | None, fresh: bool = False
) -> Process:
    words, variables = [str(each) for each in arguments], environment()
    if not fresh and sys.platform == "linux" and preloaded().fits(variables):
        return Forked(preloaded().fork("areno", words, variables, stdout, stderr), reader)
    command = [sys.executable, "-m", "areno", *words]
    process: Any = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=variables)
    process.stdout = reader
    return process  # type: ignore[no-any-return]


def forked_rank(command: Sequence[str], file: int, environment: Mapping[str, str], log: IO[bytes] | None) -> Process:
    """Replaces :func:`areno.launch.local.start_process`: a forked rank has its imports done."""
    plain = list(command) == [sys.executable, "-m", WORKER]
    if not plain or not preloaded().fits(environment, ignoring=_SET_BY_RANKS):
        return start_process(command, file, environment, log)
    outputs = (1, 2) if log is None else (log.fileno(), log.fileno())
    return ForkedRank(preloaded().fork(WORKER, [], environment, *outputs, file))


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """A record of ``metrics.jsonl`` without values that depend on the machine's speed and memory."""
    return {name: value for name, value in record.items() if not re.search("^time|time_s|per_second|^memory/", name)}


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


def wait_for_text(process: Process, text: str, timeout: float = 120) -> list[str]:
    """Read a process's output until a line contains ``text``."""
    lines: list[str] = []
    deadline = time.monotonic() + timeout
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line or time.monotonic() > deadline:
            break
    assert any(text in line for line in lines), "".join(lines)
    return lines


def kill(process: Process, signum: int = signal.SIGKILL) -> int:
    """Send a signal and wait for the end."""
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode is not None
    return process.returncode
