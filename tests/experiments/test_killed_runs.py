"""A run that is killed again and again reports, saves and computes what a run that nobody kills does."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from functools import partial

import torch

from areno.experiments.folders import ExperimentFolders
from areno.experiments.frequency import FrequencyControl, StepInfo
from areno.experiments.recovery import Recovery
from areno.experiments.saving import Saver
from areno.observability.stats_logger import StatsLogger

EPOCHS, PER_EPOCH = 3, 13


class Toy:
    """A trainer whose weights depend on all that recovery must bring back: data, random state, schedule, unused samples."""

    def __init__(self):
        self.weights, self.lr, self.position, self.unused = 0.0, 1.0, 0, [0.5]

    def step(self):
        self.position += 3
        self.unused = [*self.unused[1:], random.random(), torch.rand(1).item()]
        self.weights += self.lr * (self.unused[0] + self.position)
        self.lr *= 0.9
        return {"sft/loss/avg": self.weights}

    def write(self, folder):
        for part in range(3):
            (folder / f"part{part}.json").write_text(json.dumps([self.weights, self.lr]))

    def stage(self):
        text = json.dumps([self.weights, self.lr])
        return lambda folder: (folder / "model.json").write_text(text)


def run(root):
    folders = ExperimentFolders(root, "toy", "killed", user="me")
    run_dir = folders.create()
    logger = StatsLogger(run_dir, total_epochs=EPOCHS, steps_per_epoch=PER_EPOCH)
    saver = Saver(folders.checkpoints, partial(FrequencyControl, 1, 5, always_last=True))
    recovery = Recovery(folders.recover, "auto", FrequencyControl(freq_steps=2, always_last=True))
    trainer, at = Toy(), StepInfo.first(PER_EPOCH, EPOCHS * PER_EPOCH)
    random.seed(0), torch.manual_seed(0)
    point = recovery.load()
    if point is None:
        logger.begin_anew()
    else:
        trainer.weights, trainer.lr = json.loads((point.trainer / "part2.json").read_text())
        trainer.position, trainer.unused = point.states["data"], point.rollout_state()
        saver.load_state_dict(point.states["saver"])
        logger.load_state_dict(point.states["logger"])
        point.restore_rng()
        if point.step.is_last:
            return
        at = point.step.next()
    while True:
        numbers = trainer.step()
        time.sleep(0.002)
        saver.save_if_due("default", at, trainer.write, stage=trainer.stage)
        logger.commit(at.epoch, at.epoch_step, at.global_step, numbers)
        if at.is_last:
            saver.wait()
        recovery.dump_if_due(
            at,
            states=lambda: {"data": trainer.position, "saver": saver.state_dict(), "logger": logger.state_dict()},
            write_trainer=trainer.write,
            rollout_state=lambda: trainer.unused,
        )
        if at.is_last:
            saver.close()
            return
        at = at.next()


def told(root):
    folders = ExperimentFolders(root, "toy", "killed", user="me")
    metrics = [(record["step"], record["sft/loss/avg"]) for record in folders.run_dir.read_metrics()]
    models = {path.parent.name: path.read_text() for path in folders.checkpoints.glob("default/epoch*/model.json")}
    return metrics, models


def start(root):
    process = multiprocessing.get_context("fork").Process(target=run, args=(root,))
    process.start()
    return process


def test_a_run_killed_at_random_moments_ends_like_one_that_is_not(tmp_path):
    whole = start(tmp_path / "whole")
    whole.join()
    assert whole.exitcode == 0
    rng, kills, process = random.Random(1), 0, None
    while process is None or process.exitcode != 0:
        process = start(tmp_path / "killed")
        process.join(0.03 + rng.random() * 0.1 * (1 + kills / 20))  # a busy machine gets there too
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
        assert kills < 300
    assert kills >= 3
    metrics, models = told(tmp_path / "whole")
    assert [step for step, _ in metrics] == list(range(EPOCHS * PER_EPOCH))
    assert sorted(models) == sorted(
        f"epoch{g // PER_EPOCH}epochstep{g % PER_EPOCH}globalstep{g}" for g in (4, 9, 12, 14, 19, 24, 25, 29, 34, 38)
    )
    assert told(tmp_path / "killed") == (metrics, models)
    assert not [name for name in os.listdir(tmp_path / "killed/checkpoints/me/toy/killed/default") if name[0] == "."]
