"""What an experiment reports per step: the quickstart's line, exact metrics.jsonl, and services that fail on their own."""

from __future__ import annotations

import json
import math
import re

import pytest

from areno.cli.inspect import run as inspect_run
from areno.observability.logs import setup_logging
from areno.observability.stats_logger import StatsLogger, table
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import EXPERIMENT


class Remembering:
    """An in-process service that keeps the steps it receives."""

    name = "memory"

    def __init__(self, fails_at=None):
        self.steps, self.closed, self.fails_at = [], 0, fails_at

    def log(self, step, numbers):
        if step == self.fails_at:
            raise ConnectionError("503")
        self.steps.append((step, dict(numbers)))

    def close(self):
        self.closed += 1


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def run_dir(tmp_path):
    return RunDirectory(tmp_path / "logs", EXPERIMENT).create()


def make(run_dir, *services, clock=None):
    return StatsLogger(run_dir, total_epochs=5, steps_per_epoch=19, services=services, clock=clock or Clock())


def test_main_log_has_the_line_of_the_quickstart_and_each_statistic_by_name(run_dir, capsys):
    clock = Clock()
    with setup_logging(run_dir, level="INFO"):
        logger = make(run_dir, clock=clock)
        clock.now += 2.5
        logger.commit(0, 5, 5, {"ppo_actor/task_reward/avg": 0.4375, "ppo_actor/lr": 1e-5, "ppo_actor/lr__count": 4})
    text = (run_dir.path / "main.log").read_text()
    assert "Epoch 1/5 step 6/19 global step 6 (2.50 s, 2.5 s since the start)" in text
    assert re.search(r"^  ppo_actor/task_reward/avg \.+ 0\.4375$", text, re.M)
    assert re.search(r"^  ppo_actor/lr \.+ 1e-05$", text, re.M)
    assert "__count" not in text
    assert "step 6/19" in capsys.readouterr().err  # the terminal has the same lines


def test_values_of_the_table_are_aligned():
    lines = table(
        {"b": math.nan, "a/very/long/name/of/a/statistic/that/is/longer/than/most": 3, "c": -math.inf}
    ).splitlines()
    assert len({line.index(" ", line.index("..")) for line in lines}) == 1
    assert [line.split()[-1] for line in lines] == ["3", "nan", "-inf"]


def test_metrics_and_samples_can_be_read_by_areno_tools(run_dir, capsys):
    logger = make(run_dir)
    logger.commit(0, 0, 0, {"ppo_actor/loss": 0.1, "bad": math.nan})
    (record,) = run_dir.read_metrics()
    assert (record["step"], record["ppo_actor/loss"]) == (0, 0.1)
    assert math.isnan(record["bad"])
    run_dir.write_config("experiment_name: e\n")
    sample = {"step": 0, "prompt_index": 0, "sample_index": 1, "reward": 1.0, "advantage": None, "response_len": 2}
    run_dir.append_samples([{**sample, "completion": "four"}])
    assert inspect_run([str(run_dir.path)]) == 0
    assert "four" in capsys.readouterr().out


def test_a_recovered_run_writes_each_step_once_and_steps_of_services_never_decrease(run_dir):
    clock, service = Clock(), Remembering()
    first = make(run_dir, service, clock=clock)
    for step in range(3):
        clock.now += 10
        first.commit(0, step, step, {"x": float(step)})
        if step == 1:
            state = json.loads(json.dumps(first.state_dict()))  # recovery stores it as JSON
    clock.now = 5.0  # another process, another clock
    second = make(run_dir, service, clock=clock)
    second.load_state_dict(state)
    assert [record["step"] for record in run_dir.read_metrics()] == [0, 1]
    clock.now += 1
    second.commit(0, 2, 2, {"x": 20.0})
    assert [record["x"] for record in run_dir.read_metrics()] == [0.0, 1.0, 20.0]
    assert second.state_dict()["elapsed_s"] == 21.0
    assert [step for step, _ in service.steps] == [0, 1, 2, 2]


def test_a_repeated_or_decreasing_step_is_moved_past_the_last_one(run_dir):
    service = Remembering()
    logger = make(run_dir, service)
    for global_step in (0, 4, 4, 2, 9):
        logger.commit(0, 0, global_step, {})
    assert [step for step, _ in service.steps] == [0, 4, 5, 6, 9]


def test_measurements_before_training_do_not_shift_the_steps(run_dir):
    service = Remembering()
    logger = make(run_dir, service)
    logger.before_step({"eval-rollout/reward": 0.25, "eval-rollout/reward__count": 8})
    logger.commit(0, 0, 0, {"x": 1.0})
    logger.commit(0, 1, 1, {"x": 2.0})
    assert service.steps == [(0, {"eval-rollout/reward": 0.25, "x": 1.0}), (1, {"x": 2.0})]
    assert [r.get("eval-rollout/reward") for r in run_dir.read_metrics()] == [0.25, None, None]


def test_measurements_that_no_step_follows_are_sent_on_closing(run_dir):
    make(run_dir).commit(0, 0, 0, {"x": 1.0})
    service = Remembering()
    resumed = make(run_dir, service)
    resumed.load_state_dict({"global_step": 0, "x": 0, "elapsed_s": 1.0})
    resumed.before_step(
        {"eval-rollout/reward": 0.25}, 1
    )  # the evaluation after the last step, which a kill interrupted
    resumed.close()
    resumed.close()
    assert service.steps == [(0, {"eval-rollout/reward": 0.25})]


def test_a_failing_service_is_disabled_and_training_continues(run_dir, caplog):
    broken, whole = Remembering(fails_at=1), Remembering()
    logger = make(run_dir, broken, whole)
    for step in range(3):
        logger.commit(0, step, step, {})
    logger.close()
    logger.close()
    assert [step for step, _ in broken.steps] == [0]
    assert [step for step, _ in whole.steps] == [0, 1, 2]
    assert (broken.closed, whole.closed) == (0, 1)
    assert caplog.text.count("memory failed and is disabled: 503") == 1
