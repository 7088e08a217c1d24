"""Checkpoints are complete or absent, whenever a process is killed, and restore everything that was saved."""

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

from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.errors import CheckpointError, UsageError
from areno.spec import CheckpointSpec, Frequency
from areno.storage.contents import check_files
from areno.training import plain_objects
from areno.training.checkpoints import Checkpoints, rollout_state
from areno.training.frequency import StepInfo
from areno.training.state import RunState

PARTS = 4


class Parts:
    """A store whose files all hold the number of their step."""

    def __init__(self, step, size=1000):
        self.content = str(step).encode().rjust(20) * size

    def save_model(self, path):
        for part in range(PARTS):
            (path / f"part{part}").write_bytes(self.content)

    def save_state(self, checkpoint):
        pass

    def checkpoint_bytes(self):
        return 0


def checkpoints(root, steps=1, **options):
    return Checkpoints(CheckpointSpec(root, Frequency(steps=steps, last=True), newest=2, strict=True, **options))


def at_step(global_step, per_epoch=10):
    return StepInfo(global_step // per_epoch, global_step % per_epoch, global_step, per_epoch, 10**9)


def dump(root, step, size=1000):
    """Write the checkpoint after ``step`` completed steps."""
    state = RunState(step=step, parts={"rows": {"position": step * 7}})
    return checkpoints(root).save(state, Parts(step, size), lambda: {"unused": [step] * size})


def check(checkpoint, size=1000):
    """The step of a checkpoint, all of whose parts must agree on it."""
    state = RunState.of_checkpoint(checkpoint)
    assert state.parts == {"rows": {"position": state.step * 7}}
    assert rollout_state(checkpoint) == {"unused": [state.step] * size}
    for part in range(PARTS):
        assert (checkpoint / f"part{part}").read_bytes() == Parts(state.step, size).content
    return state.step


@pytest.mark.parametrize("first", ["best", "step_000005"])
@pytest.mark.parametrize("later", [{"unused": [1] * 9999}, {"unused": [2]}, None])
def test_rollouts_that_go_on_after_the_first_checkpoint_of_a_step_damage_neither_checkpoint(tmp_path, first, later):
    state, earlier, kept = RunState(step=5), {"unused": [1]}, checkpoints(tmp_path)
    writers = [kept.save_best, kept.save] if first == "best" else [kept.save, kept.save_best]
    for write, queue in zip(writers, (earlier, later), strict=True):
        write(state, Parts(5), lambda queue=queue: queue)
    queues = [earlier, later] if first == "best" else [later, earlier]
    for name, queue in zip(("best", "step_000005"), queues, strict=True):
        assert rollout_state(tmp_path / name) == queue
        check_files(tmp_path / name, required=True)
    assert os.path.samefile(tmp_path / "best" / "part0", tmp_path / "step_000005" / "part0")
    assert checkpoints(tmp_path).find() == tmp_path / "step_000005"
    assert names(tmp_path) == ["best", "step_000005"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoint_is_named_if_there_is_one(tmp_path):
    kept = checkpoints(tmp_path)
    assert kept.newest() == "there is no checkpoint yet"
    kept.save(RunState(step=3), Parts(3))
    kept.save_best(RunState(step=4), Parts(4))
    assert kept.newest() == "the newest checkpoint is from step 4"
    (kept.folder.best / "trainer_state" / "state.json").write_text("{")
    assert "best/trainer_state/state.json is not a valid state" in kept.newest()


def test_everything_is_restored(tmp_path):
    queue = [{"tokens": torch.arange(4), "versions": [0, 0, 1, 1], "reward": 0.5}]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    state = RunState(
        *(42, 4, 2, 7, 300.0, 1),
        health={"episodes": {}},
        rng=capture_rng(),
        unusable=41,
        evaluation_due=True,
        evaluation={"step": 40, "metrics": {"loss": 0.1}, "settings": {}},
        best={"step": 40, "metric": "loss", "value": 0.1},
        parts={"saver": {"default": {"steps": 1}}, "report": {"x": 41}},
    )
    checkpoints(tmp_path).save(state, Parts(42), lambda: queue)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    found = checkpoints(tmp_path).find()
    back = RunState.of_checkpoint(found)
    assert back == state
    assert (found / "part1").read_bytes() == Parts(42).content
    (trajectory,) = rollout_state(found)
    assert torch.equal(trajectory["tokens"], torch.arange(4))
    assert (trajectory["versions"], trajectory["reward"]) == ([0, 0, 1, 1], 0.5)
    restore_rng(back.rng)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_the_newest_two_are_kept_and_the_newest_is_loaded(tmp_path):
    for step in range(1, 5):
        dump(tmp_path, step)
    assert names(tmp_path) == ["step_000003", "step_000004"]
    assert check(checkpoints(tmp_path).find()) == 4


def test_checkpoints_are_due_at_their_frequency_also_in_a_resumed_run(tmp_path):
    first, again = checkpoints(tmp_path, steps=3), checkpoints(tmp_path, steps=3)
    assert [step for step in range(7) if first.due(at_step(step))] == [2, 5]
    again.frequency.load_state_dict(first.frequency.state_dict())
    assert [step for step in range(7, 10) if again.due(at_step(step))] == [8]


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_started(tmp_path):
    class Huge(Parts):
        def checkpoint_bytes(self):
            return 2**60

    full = checkpoints(tmp_path, remedy="save less often")
    message = r"a checkpoint needs 1\d{12}\.\d MiB plus a reserve of 64 MiB, but .*save less often"
    with pytest.raises(CheckpointError, match=message):
        full.save(RunState(step=1), Huge(1))
    assert names(tmp_path) == []


def test_disabled_checkpoints_are_neither_written_nor_read(tmp_path):
    dump(tmp_path, 1)
    off = checkpoints(tmp_path, enabled=False)
    assert off.find() is None
    assert not off.due(at_step(1))


def test_looking_for_a_checkpoint_makes_no_folder(tmp_path):
    assert checkpoints(tmp_path / "deep" / "recover").find() is None
    assert names(tmp_path) == []


def flip(path):
    """Change one bit; the length stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": lambda folder: (folder / "part1").unlink(),
    "short": lambda folder: os.truncate(folder / "part2", 100),
    "flipped weights": lambda folder: flip(folder / "part3"),
    "flipped queue": lambda folder: flip(folder / "rollout.pt"),
    "torn state": lambda folder: (folder / "trainer_state" / "state.json").write_text('{"step": 2, "ep'),
    "poor state": lambda folder: (folder / "trainer_state" / "state.json").write_text('{"step": 2, "at": 3}'),
    "changed state": lambda folder: change(folder / "trainer_state" / "state.json", '"position": 14', '"position": 8'),
    "no state": lambda folder: (folder / "trainer_state" / "state.json").unlink(),
    "no manifest": lambda folder: (folder / "trainer_state" / "manifest.json").unlink(),
    "torn manifest": lambda folder: os.truncate(folder / "trainer_state" / "manifest.json", 100),
}


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_loaded(tmp_path, damage, caplog):
    dump(tmp_path, 1), dump(tmp_path, 2)
    DAMAGES[damage](tmp_path / "step_000002")
    left = [path.name for path in (tmp_path / "step_000002").rglob("*")]
    assert check(checkpoints(tmp_path).find()) == 1
    assert names(tmp_path) == [".damaged-step_000002", "step_000001"]
    assert [path.name for path in (tmp_path / ".damaged-step_000002").rglob("*")] == left
    assert ".damaged-step_000002" in caplog.text
    dump(tmp_path, 2)
    assert check(checkpoints(tmp_path).find()) == 2
    flip(tmp_path / "step_000002" / "rollout.pt")
    checkpoints(tmp_path).find()
    assert names(tmp_path) == [".damaged-step_000002", ".damaged-step_000002-2", "step_000001"]


def test_with_all_checkpoints_damaged_the_run_does_not_start_from_scratch(tmp_path):
    dump(tmp_path, 1), dump(tmp_path, 2)
    for name in ("step_000001", "step_000002"):
        flip(tmp_path / name / "part0")
    for _ in range(2):  # nor at the second attempt
        with pytest.raises(CheckpointError, match=r"step_000002/part0.*step_000001/part0.*backup"):
            checkpoints(tmp_path).find()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_unreadable_checkpoints_end_the_run_and_are_kept(tmp_path):
    dump(tmp_path, 1), dump(tmp_path, 2)
    state = tmp_path / "step_000002" / "trainer_state" / "state.json"
    state.unlink()
    state.symlink_to("/proc/self/mem")  # reading its first page is an I/O error
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read.*Input/output error"):
        checkpoints(tmp_path).find()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_a_malicious_queue_runs_no_code(tmp_path):
    dump(tmp_path, 1)
    queue = tmp_path / "step_000001" / "rollout.pt"
    torch.save(Planted(str(tmp_path / "planted")), queue)
    with pytest.raises(CheckpointError, match=r"rollout\.pt"):
        plain_objects.load(queue)
    assert not (tmp_path / "planted").exists()


class Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_world_writable_checkpoints_are_refused(tmp_path, mode):
    dump(tmp_path / "recover", 1)
    (tmp_path / "recover").chmod(mode)
    with pytest.raises(CheckpointError, match=r"recover can be written to by every user.*chmod"):
        checkpoints(tmp_path / "recover").find()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", [".", "step_000001/rollout.pt"])
def test_checkpoints_of_another_user_are_refused(tmp_path, place):
    dump(tmp_path, 1)
    os.chown(tmp_path / place, 12345, 12345)
    with pytest.raises(CheckpointError, match="belongs to user 12345"):
        checkpoints(tmp_path).find()


def test_rows_keep_the_types_that_data_files_can_have(tmp_path):
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
def test_a_row_that_cannot_be_stored_is_refused(tmp_path, thing):
    with pytest.raises(
        UsageError,
        match=r"checkpoint cannot store.*file path.*disable checkpoints: for `areno run`, set recover\.mode=off",
    ):
        plain_objects.check({"row": thing})


def test_an_error_of_the_trainer_leaves_the_checkpoints_as_they_were(tmp_path):
    class Failing(Parts):
        def save_state(self, checkpoint):
            raise RuntimeError("optimizer")

    dump(tmp_path, 1)
    with pytest.raises(RuntimeError):
        checkpoints(tmp_path).save(RunState(step=2), Failing(2))
    assert names(tmp_path) == ["step_000001"]


def dump_in_a_loop(root, first, done):
    step = first
    while True:
        dump(root, step, size=20_000)
        done.value = step
        if step % 3 == 0:
            dump(root, step, size=20_000)  # the same step again, as in a resumed run
        step += 1


def test_a_kill_at_any_moment_leaves_the_newest_complete_checkpoint(tmp_path):
    """A process that writes checkpoints is killed 35 times; no finished checkpoint is lost, and each is complete."""
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    first, torn = 1, 0
    for kill in range(35):
        done = context.Value("q", first - 1)
        process = context.Process(target=dump_in_a_loop, args=(tmp_path, first, done))
        process.start()
        while kill >= 5 and done.value < first:  # the first kills may come before any checkpoint
            time.sleep(0.001)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        torn += any(name.startswith(".") for name in names(tmp_path)) if tmp_path.exists() else 0
        found = checkpoints(tmp_path).find()
        if found is None:
            assert done.value == 0
            continue
        step = check(found, size=20_000)
        assert step in (done.value, done.value + 1)
        assert all(name.startswith("step_") for name in names(tmp_path))
        assert len(names(tmp_path)) <= 3  # a kill may come between writing a checkpoint and removing the oldest
        first = step + 1
    assert first >= 30  # each of the other kills came after a new checkpoint
    assert torn  # some kills interrupted a write
