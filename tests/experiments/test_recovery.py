"""Recovery points: whole or absent, whatever is killed when; and everything that went in comes out."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from areno.errors import UsageError
from areno.experiments.frequency import FrequencyControl, StepInfo
from areno.experiments.recovery import Recovery

PARTS = 4


def recovery(root, mode="auto", freq_steps=1):
    return Recovery(root, mode, FrequencyControl(freq_steps=freq_steps, always_last=True))


def at_step(global_step, per_epoch=10):
    return StepInfo(global_step // per_epoch, global_step % per_epoch, global_step, per_epoch, 10**9)


def dump(points, global_step, size=1000):
    def write_trainer(folder):
        for part in range(PARTS):
            (folder / f"part{part}").write_bytes(str(global_step).encode().rjust(20) * size)

    return points.dump(
        at_step(global_step),
        states={"dataloader": {"position": global_step * 7}},
        write_trainer=write_trainer,
        rollout_state={"unused": [global_step] * size},
    )


def check(point, size=1000):
    """The step of a point, all of whose parts must agree on it."""
    step = point.step.global_step
    assert point.states == {"dataloader": {"position": step * 7}}
    assert point.rollout_state() == {"unused": [step] * size}
    for part in range(PARTS):
        assert (point.trainer / f"part{part}").read_bytes() == str(step).encode().rjust(20) * size
    return step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(tmp_path):
    weights = torch.randn(3)
    queue = [{"tokens": torch.arange(4), "versions": [0, 0, 1, 1], "reward": 0.5}]
    points = recovery(tmp_path)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    points.dump(
        at_step(41),
        states={"saver": {"default": {"steps": 1}}, "logger": {"x": 41}, "lr": {"last": 0.1}},
        write_trainer=lambda folder: torch.save(weights, folder / "w.pt"),
        rollout_state=queue,
    )
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    point = recovery(tmp_path).load()
    assert point.step == at_step(41)
    assert point.step.next().global_step == 42
    assert point.states == {"saver": {"default": {"steps": 1}}, "logger": {"x": 41}, "lr": {"last": 0.1}}
    assert torch.equal(torch.load(point.trainer / "w.pt"), weights)
    (trajectory,) = point.rollout_state()
    assert torch.equal(trajectory["tokens"], torch.arange(4))
    assert (trajectory["versions"], trajectory["reward"]) == ([0, 0, 1, 1], 0.5)
    point.restore_rng()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_the_newest_two_are_kept_and_the_newest_is_taken(tmp_path):
    points = recovery(tmp_path)
    for step in range(4):
        dump(points, step)
    assert names(tmp_path) == ["step_000003", "step_000004"]
    assert check(recovery(tmp_path).load()) == 3


def test_points_are_written_in_their_rhythm_which_a_recovery_continues(tmp_path):
    def run(points, steps):
        written = []
        for step in steps:
            path = points.dump_if_due(
                at_step(step),
                states=lambda: {},
                write_trainer=lambda folder: None,
                rollout_state=lambda step=step: step,
            )
            written += [step] if path else []
        return written

    assert run(recovery(tmp_path, freq_steps=3), range(7)) == [2, 5]
    again = recovery(tmp_path, freq_steps=3)
    point = again.load()
    assert (point.step.global_step, point.rollout_state()) == (5, 5)
    assert run(again, range(6, 10)) == [8]


@pytest.mark.parametrize("mode", ["off", "disabled"])
def test_off_neither_writes_nor_looks(tmp_path, mode):
    dump(recovery(tmp_path), 0)
    off = recovery(tmp_path, mode)
    assert off.load() is None
    assert off.dump_if_due(at_step(1), states=dict, write_trainer=lambda folder: None) is None
    assert names(tmp_path) == ["step_000001"]


def test_looking_for_a_point_makes_no_folder(tmp_path):
    points = recovery(tmp_path / "deep" / "recover", "on")
    assert points.load() is None
    assert names(tmp_path) == []


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"recover\.mode='yes'.*on, auto, off, disabled"):
        recovery(tmp_path, "yes")


@pytest.mark.parametrize(
    "damage",
    [
        lambda point: (point / "trainer" / "part1").unlink(),
        lambda point: os.truncate(point / "trainer" / "part2", 100),
        lambda point: os.truncate(point / "rollout.pkl", 10),
        lambda point: (point / "trainer_state" / "state.json").write_text('{"step": 2, "sizes"'),
        lambda point: (point / "trainer_state" / "state.json").write_text('{"step": 2}'),
        lambda point: (point / "trainer_state" / "state.json").unlink(),
    ],
)
def test_a_point_that_is_not_whole_is_never_taken(tmp_path, damage, caplog):
    points = recovery(tmp_path)
    dump(points, 0), dump(points, 1)
    damage(tmp_path / "step_000002")
    assert check(recovery(tmp_path).load()) == 0
    dump(recovery(tmp_path), 1)
    assert check(recovery(tmp_path).load()) == 1


def test_an_error_of_the_trainer_leaves_the_points_as_they_were(tmp_path):
    points = recovery(tmp_path)
    dump(points, 0)

    def fail(folder):
        (folder / "part0").write_text("half")
        raise RuntimeError("optimizer")

    with pytest.raises(RuntimeError):
        points.dump(at_step(1), states={}, write_trainer=fail)
    assert names(tmp_path) == ["step_000001"]


def dump_in_a_loop(root, first, done):
    points = recovery(root)
    step = first
    while True:
        dump(points, step, size=20_000)
        done.value = step
        if step % 3 == 0:
            dump(points, step, size=20_000)  # the same step again, as at a signal
        step += 1


def test_a_kill_at_any_moment_leaves_the_newest_whole_point(tmp_path):
    """35 times a process that writes points is killed; a point that was finished is never lost, and each is whole."""
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    first, torn = 0, 0
    for kill in range(35):
        done = context.Value("q", first - 1)
        process = context.Process(target=dump_in_a_loop, args=(tmp_path, first, done))
        process.start()
        while kill >= 5 and done.value < first:  # the first kills may fall before any point
            time.sleep(0.001)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        torn += any(name.startswith(".") for name in names(tmp_path)) if tmp_path.exists() else 0
        point = recovery(tmp_path).load()
        if point is None:
            assert done.value == -1
            continue
        step = check(point, size=20_000)
        assert step in (done.value, done.value + 1)
        assert all(name.startswith("step_") for name in names(tmp_path))
        assert len(names(tmp_path)) <= 3  # a kill may fall between a new point and the removal of the oldest
        first = step + 1
    assert first >= 30  # each of the other kills had a point of its own before it
    assert torn  # or the test has not hit what it is for
