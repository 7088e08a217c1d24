"""Asynchronous runs whose processes are killed: each step is reported once, each row is trained on once, no process is left."""

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

    def make(name: str = "run", forked: bool = False, **changes: Any) -> Run:
        folder = tmp_path / name
        given = settings(task, folder / "files", **{"total_train_steps": STEPS, **changes})
        made.append(Run(folder, given, forked=forked))
        return made[-1]

    yield make
    for run in made:
        run.end()


def partial(folder: Path) -> bool:
    """Whether something is being written to a folder."""
    return folder.is_dir() and any(name.startswith(".partial") for name in os.listdir(folder))


def killed_until_done(run: Run, moments: Any, most: int = 60) -> int:
    """Start the same command until it completes; ``moments`` waits and kills it, or returns False to let it run."""
    for kills in range(most):
        run.start()
        if not moments(run, kills):
            assert run.wait() == 0, run.output[-6000:]
            return kills
        assert run.none_left(), run.pids()
    raise AssertionError("the run has not completed")


@pytest.mark.long
def test_a_killed_run_resumes_where_it_stopped(make_run, task):
    """All processes are killed at once, in the middle of the run."""
    run = make_run(forked=True).start()
    assert run.until_step(4)
    assert len(run.pids()) >= 2
    run.kill()
    assert run.none_left(), run.pids()
    before = run.steps()
    run.finish()
    assert "resumed from" in run.log
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
def test_kills_while_a_model_or_a_recovery_checkpoint_is_written(make_run, task, where):
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
    assert sum(hit) >= 1, "no kill has interrupted a write"
    check_rows(run, task, 24)
    models = {path.name: load_file(path / "model.safetensors") for path in (run.checkpoints / "default").glob("epoch*")}
    assert len(models) == 24
    assert not partial(run.checkpoints / "default")
    assert not partial(run.checkpoints / "recover")


@pytest.mark.long
def test_a_killed_rollout_worker_is_replaced_and_the_run_goes_on(make_run, task):
    run = make_run(rollout__backend="areno:d2").start()
    assert run.until_step(2)
    victim = random.Random(1).choice(run.workers(rollout=True))
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 0, run.output[-6000:]
    assert "was killed by signal 9" in run.log
    assert run.none_left()
    check_rows(run, task, STEPS)
    assert not any(line["rollout/failed"] for line in run.lines("metrics.jsonl"))


@pytest.mark.long
def test_the_run_survives_repeated_kills_of_its_only_rollout_worker(make_run, task):
    """At random times, also during weight updates."""
    run = make_run(total_train_steps=30).start()
    draws = random.Random(2)
    killed = set()
    for after in (1, 8, 16):
        assert run.until_step(after)
        time.sleep(draws.random() * 0.2)
        for victim in run.workers(rollout=True):
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
    assert len(killed) == 3
    assert run.wait() == 0, run.output[-6000:]
    assert run.log.count("rollout/0 was restarted") == 3
    check_rows(run, task, 30)


@pytest.mark.long
def test_a_rollout_worker_that_always_dies_ends_the_run_and_is_named(make_run):
    run = make_run(total_train_steps=100000, recover__retries=0).start()
    assert run.until_step(1)
    known = set()

    def new_worker() -> bool:
        return bool(set(run.workers(rollout=True)) - known)

    while run.until(new_worker, timeout=60, interval=0.05):
        for victim in run.workers(rollout=True):
            known.add(victim)
            os.kill(victim, signal.SIGKILL)
    assert run.wait() not in (0, None)
    assert "rollout/0 failed, and its 3 restarts are used up" in run.log
    assert "was killed by signal 9" in run.output
    assert run.none_left()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["any", "default", "recover"])
def test_a_killed_trainer_rank_ends_the_run_with_an_error_and_the_next_start_resumes(make_run, task, moment):
    run = make_run(actor__backend="fsdp:d2", saver__freq_steps=1, recover__retries=0).start()
    assert run.until_step(3)
    ranks = run.workers(rollout=False)
    assert len(ranks) == 2
    if moment == "any":
        time.sleep(random.Random(3).random() * 0.3)
    else:
        assert run.until(lambda: partial(run.checkpoints / moment), interval=0.0)
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(60) not in (0, None)
    assert "the experiment failed: EngineError: rank 1 of 2" in run.log
    assert "was killed by signal 9" in run.output
    assert run.none_left(), run.pids()
    run.finish()
    check_rows(run, task, STEPS)


@pytest.mark.long
def test_without_staleness_a_killed_run_ends_with_the_same_weights(make_run, task):
    """Rows, tokens, optimizer, schedule and random state: an error of one step in any of them changes the weights."""
    same = {
        "rollout__max_head_offpolicyness": 0,
        "actor__optimizer__lr_scheduler_type": "cosine",
        "saver__freq_steps": 6,
    }
    whole = make_run("whole", **same).finish()
    run = make_run("killed", **same)
    draws = random.Random(4)

    def moment(run: Run, kills: int) -> bool:
        if kills == 3:
            return False
        run.until_step(2 + 3 * kills)
        time.sleep(draws.random() * 0.3)
        run.kill()
        return True

    assert killed_until_done(run, moment) == 3
    check_rows(run, task, STEPS)
    assert recorded_samples(run) == recorded_samples(whole)
    start = load_file(task.model / "model.safetensors")
    for name in ("epoch0epochstep5globalstep5", "epoch0epochstep11globalstep11"):
        mine = load_file(run.checkpoints / "default" / name / "model.safetensors")
        theirs = load_file(whole.checkpoints / "default" / name / "model.safetensors")
        for tensor, value in theirs.items():
            # Rounding of log-probs depends on what is decoded together, which differs after a kill. Adam can amplify a
            # gradient near zero to a full step, so single entries say nothing. A schedule or a moment that is off by one
            # step changes the whole update by a hundredth.
            difference = (mine[tensor] - value).norm() / (value - start[tensor]).norm()
            assert difference < 1e-3, (name, tensor, float(difference))


def recorded_samples(run: Run) -> list[tuple[Any, ...]]:
    names = ("step", "prompt_index", "sample_index", "prompt", "completion", "reward")
    return [tuple(line[name] for name in names) for line in run.lines("samples.jsonl")]
