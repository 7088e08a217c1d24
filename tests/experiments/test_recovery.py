"""Recovery points: whole or absent, whatever is killed when; and everything that went in comes out."""

from __future__ import annotations

import datetime
import decimal
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from areno.errors import CheckpointError, UsageError
from areno.experiments import plain_objects
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


def test_a_point_that_the_disk_has_no_room_for_is_not_begun(tmp_path):
    points = recovery(tmp_path, freq_steps=1)
    with pytest.raises(CheckpointError, match=r"a checkpoint needs 1\d{12} MiB and .*\(recover\.freq"):
        points.dump_if_due(at_step(0), states=dict, write_trainer=lambda folder: None, needed_bytes=lambda: 2**60)
    assert names(tmp_path) == []


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


def flip(path):
    """Change one bit; the length stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": lambda point: (point / "trainer" / "part1").unlink(),
    "short": lambda point: os.truncate(point / "trainer" / "part2", 100),
    "flipped weights": lambda point: flip(point / "trainer" / "part3"),
    "flipped queue": lambda point: flip(point / "rollout.pt"),
    "torn state": lambda point: (point / "trainer_state" / "state.json").write_text('{"step": 2, "at"'),
    "poor state": lambda point: (point / "trainer_state" / "state.json").write_text('{"step": 2}'),
    "changed state": lambda point: change(point / "trainer_state" / "state.json", '"position": 7', '"position": 8'),
    "no state": lambda point: (point / "trainer_state" / "state.json").unlink(),
    "no manifest": lambda point: (point / "trainer_state" / "manifest.json").unlink(),
    "torn manifest": lambda point: os.truncate(point / "trainer_state" / "manifest.json", 100),
}


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_point_is_set_aside_and_the_one_before_it_is_taken(tmp_path, damage, caplog):
    points = recovery(tmp_path)
    dump(points, 0), dump(points, 1)
    DAMAGES[damage](tmp_path / "step_000002")
    left = [path.name for path in (tmp_path / "step_000002").rglob("*")]
    assert check(recovery(tmp_path).load()) == 0
    assert names(tmp_path) == [".damaged-step_000002", "step_000001"]
    assert [path.name for path in (tmp_path / ".damaged-step_000002").rglob("*")] == left
    assert ".damaged-step_000002" in caplog.text
    dump(recovery(tmp_path), 1)
    assert check(recovery(tmp_path).load()) == 1
    flip(tmp_path / "step_000002" / "rollout.pt")
    recovery(tmp_path).load()
    assert names(tmp_path) == [".damaged-step_000002", ".damaged-step_000002-2", "step_000001"]


def test_with_all_points_damaged_the_run_does_not_begin_anew(tmp_path):
    points = recovery(tmp_path)
    dump(points, 0), dump(points, 1)
    for name in ("step_000001", "step_000002"):
        flip(tmp_path / name / "trainer" / "part0")
    for _ in range(2):  # and not at the second attempt either
        with pytest.raises(CheckpointError, match=r"step_000002/trainer/part0.*step_000001/trainer/part0.*copy"):
            recovery(tmp_path).load()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_points_that_the_disk_does_not_give_end_the_run_and_stay(tmp_path):
    points = recovery(tmp_path)
    dump(points, 0), dump(points, 1)
    state = tmp_path / "step_000002" / "trainer_state" / "state.json"
    state.unlink()
    state.symlink_to("/proc/self/mem")  # reading its first page is an I/O error
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read.*Input/output error"):
        recovery(tmp_path).load()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_a_planted_queue_runs_no_code(tmp_path):
    points = recovery(tmp_path)
    dump(points, 0)
    queue = tmp_path / "step_000001" / "rollout.pt"
    torch.save(Planted(str(tmp_path / "planted")), queue)
    with pytest.raises(CheckpointError, match=r"rollout\.pt"):
        plain_objects.load(queue)
    assert not (tmp_path / "planted").exists()


class Planted:
    """Makes a folder where something unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_points_that_everybody_can_write_to_are_refused(tmp_path, mode):
    dump(recovery(tmp_path / "recover"), 0)
    (tmp_path / "recover").chmod(mode)
    with pytest.raises(CheckpointError, match=r"recover can be written to by every user.*chmod"):
        recovery(tmp_path / "recover").load()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", [".", "step_000001/rollout.pt"])
def test_points_of_another_user_are_refused(tmp_path, place):
    dump(recovery(tmp_path), 0)
    os.chown(tmp_path / place, 12345, 12345)
    with pytest.raises(CheckpointError, match="belongs to user 12345"):
        recovery(tmp_path).load()


def test_rows_come_back_with_the_types_that_files_of_rows_have(tmp_path):
    row = {
        "text": "é",
        "score": 0.1,
        "big": 2**80,
        "none": None,
        "bytes": b"\0",
        "pair": (1, [True]),
        "day": datetime.date(2024, 2, 29),
        "time": datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        "price": decimal.Decimal("1.10"),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "number": np.float32(0.1),
        7: frozenset({1}),
    }
    plain_objects.save({"waiting": [row]}, tmp_path / "file")
    (back,) = plain_objects.load(tmp_path / "file")["waiting"]
    assert [type(value) for value in back.values()] == [type(value) for value in row.values()]
    assert np.array_equal(back.pop("array"), row.pop("array"))
    assert back == row


@pytest.mark.parametrize("thing", [object(), lambda: 1, random.Random(0), print])
def test_a_row_that_cannot_be_kept_is_refused_when_it_is_written(tmp_path, thing):
    with pytest.raises(UsageError, match=r"recovery point cannot keep.*path of a file"):
        plain_objects.check({"row": thing})


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
