"""Asynchronous runs whose processes are really killed: each step is told once, each row is trained on once, nothing stays."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.experiments.runs import Run, Task, check_rows, make_task, settings

STEPS = 12


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def make_run(task: Task, tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def make(name: str = "run", **changes: Any) -> Run:
        folder = tmp_path / name
        made.append(Run(folder, settings(task, folder / "files", **{"total_train_steps": STEPS, **changes})))
        return made[-1]

    yield make
    for run in made:
        run.end()


def partial(folder: Path) -> bool:
    """Whether something is being written there."""
    return folder.is_dir() and any(name.startswith(".partial") for name in os.listdir(folder))


def killed_until_done(run: Run, moments: Any, most: int = 60) -> int:
    """Start the same command again and again; ``moments`` waits for the next kill and says who dies (False: nobody)."""
    kills = 0
    for _ in range(most):
        run.start()
        if not moments(run, kills):
            assert run.wait() == 0, run.output[-6000:]
            return kills
        assert run.none_left(), run.pids()
        kills += 1
    raise AssertionError("the run has not come to its end")


def test_a_killed_run_goes_on_where_it_was(make_run, task):
    """All processes at once, in the middle of the run."""
    run = make_run().start()
    assert run.until_step(4)
    run.kill()
    assert run.none_left(), run.pids()
    before = run.steps()
    run.finish()
    assert "recovering after global step" in run.log
    assert run.steps()[: len(before) - 1] == before[:-1]
    check_rows(run, task, STEPS)
    assert run.none_left()


@pytest.mark.long
@pytest.mark.parametrize("group", [True, False], ids=["all processes", "the trainer alone"])
def test_kills_at_random_moments(make_run, task, group):
    draws = random.Random(group)

    def moment(run: Run, kills: int) -> bool:
        if kills == 5:
            return False
        have = max(run.steps(), default=-1)
        if not run.until(lambda: max(run.steps(), default=-1) > have, interval=0.002):
            return False
        time.sleep(draws.random() * 0.4)
        run.kill(group=group)
        return True

    run = make_run(saver__freq_steps=1, total_train_steps=40)
    kills = killed_until_done(run, moment)
    assert kills >= 3
    check_rows(run, task, 40)


@pytest.mark.long
@pytest.mark.parametrize("where", ["default", "recover"])
def test_kills_while_a_model_or_a_restart_point_is_written(make_run, task, where):
    hit = []

    def moment(run: Run, kills: int) -> bool:
        if kills == 4:
            return False
        have = max(run.steps(), default=-1)
        if not run.until(lambda: max(run.steps(), default=-1) > have + 1):
            return False
        found = run.until(lambda: partial(run.checkpoints / where), interval=0.0)
        run.kill()
        hit.append(partial(run.checkpoints / where))
        return found

    run = make_run(saver__freq_steps=1, saver__mode="sync", total_train_steps=24)
    kills = killed_until_done(run, moment)
    assert kills >= 3
    assert sum(hit) >= 1, "no kill has fallen into a write"
    check_rows(run, task, 24)
    models = {path.name: load_file(path / "model.safetensors") for path in (run.checkpoints / "default").glob("epoch*")}
    assert len(models) == 24
    assert not partial(run.checkpoints / "default")
    assert not partial(run.checkpoints / "recover")
