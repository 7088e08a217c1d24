"""Experiments as users start them, in separate processes that a test can kill: a task, a run, and its outputs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno.training import plain_objects
from examples.experiments import toy
from tests.support.cli import Process, environment, start_program
from tests.support.processes import alive

RATE = 0.003
"""Learning rate of each optimizer step."""

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "examples/experiments/toy.py"
_MARK = "ARENO_TEST_RUN"


@dataclass(frozen=True)
class Task:
    """A toy model and rows whose prompts all differ, so that a prompt identifies its row."""

    model: Path
    rows: Path
    prompts: list[str]


def make_task(folder: Path, count: int = 48) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    toy.make_model(folder / "model")
    letters = toy.LETTERS
    names = [a + b + c for a in letters for b in letters for c in letters][:: max(len(letters) ** 3 // count, 1)][
        :count
    ]
    rows = [{"prompt": f"Say {name}.", "letter": name[0]} for name in names]
    toy.write(folder / "train.jsonl", rows)
    return Task(folder / "model", folder / "train.jsonl", [row["prompt"] for row in rows])


def settings(task: Task, fileroot: Path, **changes: Any) -> list[str]:
    """A GRPO run as ``key=value``, with the changes of the test (``__`` stands for a dot)."""
    values: dict[str, Any] = {
        "experiment_name": "toy",
        "trial_name": "t",
        "cluster.fileroot": fileroot,
        "train_dataset.path": task.rows,
        "train_dataset.type": "rl",
        "train_dataset.batch_size": 4,
        "total_train_epochs": 100,
        "total_train_steps": 12,
        "gconfig.n_samples": 2,
        "gconfig.max_new_tokens": 8,
        "gconfig.max_tokens": 64,
        "rollout.backend": "areno:d1",
        "rollout.max_head_offpolicyness": 2,
        "reward.fn": f"{TOY}:letter_reward",
        "actor.path": task.model,
        "actor.backend": "fsdp:d1",
        "actor.ppo_n_minibatches": 1,
        "actor.optimizer.lr": RATE,
        "actor.optimizer.weight_decay": 0.0,
        "recover.mode": "auto",
        "recover.freq_steps": 1,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={_written(value)}" for name, value in values.items()]


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list | dict) or value is None else str(value)


@dataclass
class Run:
    """A command that can be started repeatedly; a variable in the environment identifies its processes.

    Attributes:
        folder: holds ``file.yaml``, and ``output.txt`` of all attempts.
        arguments: ``key=value``.
        program: program that gets the arguments.
        forked: fork from a process that has imported everything; its processes then share a session with others.
    """

    folder: Path
    arguments: list[str]
    program: tuple[str, ...] = ("-m", "areno", "run")
    environment: dict[str, str] = field(default_factory=dict)
    forked: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: Process | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fileroot = Path(next(a for a in self.arguments if a.startswith("cluster.fileroot=")).partition("=")[2])

    # -- files -----------------------------------------------------------------------------------------------------

    def _trial(self, kind: str) -> Path:
        return next((self.fileroot / kind).glob("*/*/*"), self.fileroot / kind / "none")

    @property
    def logs(self) -> Path:
        return self._trial("logs")

    @property
    def checkpoints(self) -> Path:
        return self._trial("checkpoints")

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    @property
    def log(self) -> str:
        path = self.logs / "main.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.logs / name
        text = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines("metrics.jsonl")]

    def logged_steps(self) -> list[int]:
        """Global steps of the tables in ``main.log``, counted from 1, without those that a recovery repeats."""
        found: list[int] = []
        for line in self.log.splitlines():
            if "no checkpoint in" in line:
                found = []
            elif back := re.search(r"resumed from \S+: (\d+) steps are done", line):
                found = [step for step in found if step <= int(back[1])]
            elif table := re.search(r"Epoch \d+/\d+ step \d+/\d+ global step (\d+) ", line):
                found.append(int(table[1]))
        return found

    def recovery_checkpoints(self) -> list[Path]:
        return sorted(
            path for path in self.checkpoints.glob("recover/step_*") if (path / "trainer_state/state.json").exists()
        )

    def rollout_state(self) -> dict[str, Any]:
        return plain_objects.load(self.recovery_checkpoints()[-1] / "rollout.pt")

    # -- processes -------------------------------------------------------------------------------------------------

    def start(self) -> Run:
        (self.folder / "file.yaml").write_text("{}\n")
        command = [*self.program, "--config", str(self.folder / "file.yaml"), *self.arguments]
        variables = {**environment(), "PYTHONPATH": str(ROOT), _MARK: self.mark, **self.environment}
        with open(self.folder / "output.txt", "ab") as output:
            words = command[1:] if command[0] == "-m" else command
            forked = start_program(words, variables, output.fileno()) if self.forked else None
            self.process = forked or subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        return self

    def pids(self) -> list[int]:
        """All processes of this run, the first included, identified by a variable or, if forked, by the file they write to."""
        wanted = f"{_MARK}={self.mark}".encode()
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if (wanted in _bytes(pid, "environ").split(b"\0") or self.folder in _errors_of(pid).parents) and alive(pid)
        ]

    def workers(self, *, rollout: bool) -> list[int]:
        """Ranks of rollout replicas, or of the trainer."""
        found = []
        for pid in sorted(self.pids()):
            if b"areno.engine.parallel.worker" not in _bytes(pid, "cmdline"):
                continue
            if ("rollout-" in _errors_of(pid).name) == rollout:
                found.append(pid)
        return found

    def wait(self, timeout: float = 240) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def finish(self, timeout: float = 300) -> Run:
        """Start the command, and wait until it exits with status 0."""
        assert self.start().wait(timeout) == 0, self.output[-6000:]
        return self

    def until(self, condition: Callable[[], Any], timeout: float = 120, interval: float = 0.005) -> bool:
        """Wait for a condition while the run continues; returns whether it held before the run ended."""
        assert self.process is not None
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"the condition did not become true in time\n{self.output[-3000:]}"
            time.sleep(interval)
        return True

    def until_step(self, step: int) -> bool:
        return self.until(lambda: max(self.steps(), default=-1) >= step)

    def kill(self, *, group: bool = True) -> None:
        """Send SIGKILL to all processes of the session, or only to the first one."""
        assert self.process is not None
        first = self.process.pid
        if group and not self.forked:
            os.killpg(first, signal.SIGKILL)
        else:
            session = os.getsid(first)
            for pid in [pid for pid in self.pids() if os.getsid(pid) == session] if group else [first]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def none_left(self, seconds: float = 10.0) -> bool:
        deadline = time.monotonic() + seconds
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.pids()

    def end(self) -> None:
        """Kill all processes that are still running."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def _errors_of(pid: int) -> Path:
    """File to which a process writes errors."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/2"))
    except OSError:
        return Path()


def _bytes(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def used_rows(run: Run) -> Iterator[tuple[int, int, str]]:
    """Step, episode and prompt of every group that a batch has used, from ``samples.jsonl``."""
    seen = set()
    for line in run.lines("samples.jsonl"):
        key = line["step"], line["prompt_index"]
        if key not in seen:
            seen.add(key)
            yield (*key, line["prompt"])


def check_rows(run: Run, task: Task, steps: int, batch: int = 4) -> None:
    """Each step is reported once, and each row is in exactly one batch, or waits for one in the last recovery checkpoint."""
    assert run.steps() == list(range(steps))
    assert run.logged_steps() == list(range(1, steps + 1))
    used = list(used_rows(run))
    by_step: dict[int, list[int]] = {}
    for step, episode, _ in used:
        by_step.setdefault(step, []).append(episode)
    assert {step: len(episodes) for step, episodes in by_step.items()} == dict.fromkeys(range(steps), batch)
    state = run.rollout_state()
    left = [kept["id"] for kept in (*state["waiting"], *state["finished"])]
    assert sorted([episode for _, episode, _ in used] + left) == list(range(state["next_id"]))
    # Episodes are numbered as rows are read, so every len(task.prompts) consecutive episodes are one epoch.
    prompts = {episode: next(p for p in task.prompts if p in prompt) for _, episode, prompt in used}
    prompts |= {kept["id"]: kept["data"]["prompt"] for kept in (*state["waiting"], *state["finished"])}
    for first in range(0, state["next_id"], len(task.prompts)):
        epoch = [prompts[episode] for episode in range(first, min(first + len(task.prompts), state["next_id"]))]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == len(task.prompts):
            assert sorted(epoch) == sorted(task.prompts)
