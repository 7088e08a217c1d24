"""A run that is killed repeatedly reports, saves and computes the same as an uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time

import torch

from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.experiments.folders import ExperimentFolders
from areno.observability.stats_logger import StatsLogger
from areno.spec import CheckpointSpec, Frequency
from areno.training.checkpoints import Checkpoints, rollout_state
from areno.training.frequency import StepInfo
from areno.training.saving import Saver
from areno.training.state import RunState

EPOCHS, PER_EPOCH = 3, 13


class Toy:
    """A trainer whose weights depend on all that recovery must restore: data, random state, schedule, unused samples."""

    def __init__(self):
        self.weights, self.lr, self.position, self.unused = 0.0, 1.0, 0, [0.5]

    def step(self):
        self.position += 3
        self.unused = [*self.unused[1:], random.random(), torch.rand(1).item()]
        self.weights += self.lr * (self.unused[0] + self.position)
        self.lr *= 0.9
        return {"sft/loss/avg": self.weights}

    def save_model(self, folder):
        for part in range(3):
            (folder / f"part{part}.json").write_text(json.dumps([self.weights, self.lr]))

    def save_state(self, checkpoint):
        pass

    def checkpoint_bytes(self):
        return 0

    def stage(self):
        text = json.dumps([self.weights, self.lr])
        return lambda folder: (folder / "model.json").write_text(text)


def run(root):
    folders = ExperimentFolders(root, "toy", "killed", user="me")
    run_dir = folders.create()
    logger = StatsLogger(run_dir, total_epochs=EPOCHS, steps_per_epoch=PER_EPOCH)
    saver = Saver(folders.checkpoints, Frequency(1, 5, last=True))
    checkpoints = Checkpoints(CheckpointSpec(folders.recover, Frequency(steps=2, last=True), newest=2, strict=True))
    trainer, at = Toy(), StepInfo(0, 0, 0, PER_EPOCH, EPOCHS * PER_EPOCH)
    random.seed(0), torch.manual_seed(0)
    found = checkpoints.find()
    if found is None:
        logger.reset()
    else:
        state = RunState.of_checkpoint(found)
        trainer.weights, trainer.lr = json.loads((found / "part2.json").read_text())
        trainer.position, trainer.unused = state.parts["data"], rollout_state(found)
        saver.load_state_dict(state.parts["saver"])
        logger.load_state_dict(state.parts["logger"])
        checkpoints.frequency.load_state_dict(state.parts["checkpoints"])
        restore_rng(state.rng)
        at = StepInfo(state.epoch, state.epoch_step, state.step - 1, PER_EPOCH, EPOCHS * PER_EPOCH)
        if at.is_last:
            return
        at = at.next()
    while True:
        numbers = trainer.step()
        time.sleep(0.002)
        saver.save_if_due("default", at, trainer.save_model, stage=trainer.stage)
        logger.commit(at.epoch, at.epoch_step, at.global_step, numbers)
        if at.is_last:
            saver.wait()
        if checkpoints.due(at):
            parts = {"data": trainer.position, "saver": saver.state_dict(), "logger": logger.state_dict()}
            parts["checkpoints"] = checkpoints.frequency.state_dict()
            state = RunState(at.global_step + 1, at.epoch, at.epoch_step, rng=capture_rng(), parts=parts)
            checkpoints.save(state, trainer, lambda: trainer.unused)
        if at.is_last:
            saver.close()
            return
        at = at.next()


def results_of(root):
    folders = ExperimentFolders(root, "toy", "killed", user="me")
    metrics = [(record["step"], record["sft/loss/avg"]) for record in folders.run_dir.read_metrics()]
    models = {path.parent.name: path.read_text() for path in folders.checkpoints.glob("default/epoch*/model.json")}
    return metrics, models


def start(root):
    process = multiprocessing.get_context("fork").Process(target=run, args=(root,))
    process.start()
    return process


def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path):
    whole = start(tmp_path / "whole")
    whole.join()
    assert whole.exitcode == 0
    rng, kills, process = random.Random(1), 0, None
    while process is None or process.exitcode != 0:
        process = start(tmp_path / "killed")
        process.join(0.03 + rng.random() * 0.1 * (1 + kills / 20))  # longer each time, for busy machines
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
        assert kills < 300
    assert kills >= 3
    metrics, models = results_of(tmp_path / "whole")
    assert [step for step, _ in metrics] == list(range(EPOCHS * PER_EPOCH))
    assert sorted(models) == sorted(
        f"epoch{g // PER_EPOCH}epochstep{g % PER_EPOCH}globalstep{g}" for g in (4, 9, 12, 14, 19, 24, 25, 29, 34, 38)
    )
    assert results_of(tmp_path / "killed") == (metrics, models)
    assert not [name for name in os.listdir(tmp_path / "killed/checkpoints/me/toy/killed/default") if name[0] == "."]
