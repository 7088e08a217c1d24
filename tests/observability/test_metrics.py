"""Step metrics: the documented names with the right values, in TensorBoard and in metrics.jsonl."""

import json
import logging
import math
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from areno.api.trainers.step_reporter import StepReporter
from areno.config.all_train_options import TrainOptions
from areno.errors import ArenoError
from areno.observability.health import HealthMonitor
from areno.observability.scalars import step_scalars
from areno.observability.tensorboard import EventWriter
from areno.storage.run_dir import RunDirectory
from areno.training.frequency import StepInfo
from areno.training.reporter import StepOutcome
from areno.training.state import RunState
from areno.types import TrainSequence, WeightedReward

ROLLOUT_KEYS = {
    f"rollout/{name}"
    for name in (
        *("rewards_mean", "rewards_std", "rewards_max", "rewards_min", "accuracy"),
        *("advantages_mean", "advantages_std", "logprobs_mean", "seq_len_mean", "prompt_len_mean"),
        *("response_len_mean", "num_sequences", "skipped_long", "total_skipped_long"),
    )
}


def policy_rows():
    return [
        TrainSequence(
            prompt_mask=[True, True, False, False, False],
            tokens=[1, 2, 3, 4, 5],
            logprobs=[0.0, 0.0, -1.0, -2.0, -9.0],
            advantages=[0.0, 0.0, 1.0, 1.0, 50.0],
            loss_mask=[False, False, True, True, False],
        ),
        TrainSequence(
            prompt_mask=[True, False, False],
            tokens=[1, 2, 3],
            logprobs=[0.0, -3.0, -4.0],
            advantages=[0.0, -1.0, -1.0],
        ),
    ]


def scalars(**changes):
    arguments = {
        "rows": policy_rows(),
        "train_stats": {},
        "timings": {},
        "skipped_long": 0,
        "total_skipped_long": 0,
        "rewards": [1.0, -0.5, 0.0, 0.25],
    }
    return step_scalars(**(arguments | changes))


def read_events(log_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_rollout_scalars_are_the_documented_ones():
    assert set(scalars()) == ROLLOUT_KEYS


def test_accuracy_is_the_share_of_rewards_above_zero():
    values = scalars()
    assert values["rollout/accuracy"] == 0.5
    assert values["rollout/rewards_mean"] == pytest.approx(0.1875)
    assert values["rollout/rewards_std"] == pytest.approx(np.std([1.0, -0.5, 0.0, 0.25]))
    assert (values["rollout/rewards_max"], values["rollout/rewards_min"]) == (1.0, -0.5)


def test_each_part_of_a_reward_has_its_mean():
    rewards = [WeightedReward(1.0, {"format": 1.0, "answer": 0.8}), WeightedReward(0.5, {"format": 0.0, "answer": 0.5})]
    values = scalars(rewards=rewards)
    assert set(values) == ROLLOUT_KEYS | {"rollout/reward_parts/format", "rollout/reward_parts/answer"}
    assert values["rollout/rewards_mean"] == 0.75
    assert values["rollout/reward_parts/format"] == 0.5
    assert values["rollout/reward_parts/answer"] == pytest.approx(0.65)


def test_token_statistics_count_only_tokens_that_are_trained_on():
    values = scalars()
    assert values["rollout/advantages_mean"] == pytest.approx(0.0)
    assert values["rollout/advantages_std"] == pytest.approx(1.0)
    assert values["rollout/logprobs_mean"] == pytest.approx(-2.5)


def test_lengths_are_means_over_rows():
    values = scalars(skipped_long=2, total_skipped_long=11)
    assert values["rollout/num_sequences"] == 2
    assert values["rollout/seq_len_mean"] == 4
    assert values["rollout/prompt_len_mean"] == 1.5
    assert values["rollout/response_len_mean"] == 2.5
    assert (values["rollout/skipped_long"], values["rollout/total_skipped_long"]) == (2, 11)


def test_supervised_rows_get_only_keys_that_make_sense():
    rows = [TrainSequence(prompt_mask=[True, False, False], tokens=[1, 2, 3])]
    assert set(scalars(rows=rows, rewards=None)) == {
        f"rollout/{name}"
        for name in (
            *("num_sequences", "seq_len_mean", "prompt_len_mean", "response_len_mean"),
            *("skipped_long", "total_skipped_long"),
        )
    }


def test_a_step_without_rows_still_counts_what_was_skipped():
    values = scalars(rows=[], rewards=[], skipped_long=3, total_skipped_long=3)
    assert values == {"rollout/num_sequences": 0, "rollout/skipped_long": 3, "rollout/total_skipped_long": 3}


def test_every_scalar_of_train_stats_is_recorded_and_nothing_else():
    stats = {
        "loss": torch.tensor(0.5),
        "grad_norm": np.float32(2.0),
        "lr": 1e-6,
        "grad_zero_count": 3,
        "nan": math.nan,
        "name": "gspo",
        "histogram": np.zeros(3),
        "tensor": torch.zeros(2),
        "nothing": None,
    }
    values = {key: value for key, value in scalars(train_stats=stats).items() if key.startswith("train/")}
    assert math.isnan(values.pop("train/nan"))
    assert values == {"train/loss": 0.5, "train/grad_norm": 2.0, "train/lr": 1e-6, "train/grad_zero_count": 3}
    assert {type(value) for value in values.values()} <= {int, float}


def test_events_and_metrics_file_hold_the_same_scalars(tmp_path):
    run_dir = RunDirectory(tmp_path).create()
    report = StepReporter(TrainOptions(run_dir=str(tmp_path)), logging.getLogger(__name__), HealthMonitor())
    timings = {"rollout": 2.0, "reward": 0.5, "advantage": 0.25, "train": 1.0}
    for step in range(2):
        outcome = StepOutcome(policy_rows(), {"loss": 0.5 + step}, timings, rewards=[1.0, 0.0], skipped_long=1)
        report.record_step(StepInfo(0, step, step, 2, 2), outcome, RunState(step=step, skipped_long=1 + step))
    report.record_evaluation(RunState(step=2), {"accuracy": 0.75})
    report.close()
    report.close()
    events = read_events(run_dir.events_path)
    assert events.pop("eval/accuracy") == [(2, 0.75)]
    assert set(events) == ROLLOUT_KEYS | {f"time/{name}" for name in timings} | {
        "train/loss",
        "train/step_wall_time_s",
    }
    *lines, evaluation = [json.loads(line) for line in run_dir.metrics_path.read_text().splitlines()]
    assert evaluation.keys() - {"time"} == {"step", "eval/accuracy"}
    for step, line in enumerate(lines):
        assert set(line) == set(events) | {"step", "time"}
        for tag, points in events.items():
            assert points[step] == (step, pytest.approx(line[tag]))
    assert len(lines) == 2


def test_a_resumed_run_purges_the_steps_that_it_repeats(tmp_path, monkeypatch):
    """Also within a second of the earlier run, and with a clock that was set back."""
    for purge_step, steps, loss in ((None, range(4), 1.0), (2, range(2, 4), 5.0)):
        events = EventWriter(tmp_path, purge_step)
        for step in steps:
            events.log(step, {"train/loss": loss})
        events.close()
    assert read_events(tmp_path)["train/loss"] == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]
    with monkeypatch.context() as changed:
        changed.setattr("time.time", lambda: 1e9)
        events = EventWriter(tmp_path, 3)
        events.log(3, {"train/loss": 7.0})
        events.close()
    assert read_events(tmp_path)["train/loss"] == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 7.0)]


def test_an_unwritable_event_folder_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    events = EventWriter(tmp_path / "file" / "events")
    events.log(0, {})
    with pytest.raises(ArenoError, match=r"events.*--metrics-log-dir"):
        events.close()


def test_an_error_names_the_thread_limit_if_no_thread_can_be_started(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)  # exhausting the machine's threads would end other tests
    with pytest.raises(ArenoError, match=r"can't start new thread; stop other programs, or raise .*ulimit -u"):
        EventWriter(tmp_path / "events").log(0, {"train/loss": 1.0})


def test_recording_after_close_is_an_error(tmp_path):
    events = EventWriter(tmp_path)
    events.close()
    with pytest.raises(ArenoError, match="closed"):
        events.log(0, {})


def test_a_program_that_forgets_close_loses_no_events_and_does_not_hang(tmp_path):
    program = (
        "import sys; from areno.observability.tensorboard import EventWriter\n"
        "import threading, time; work = EventWriter._work\n"
        "EventWriter._work = lambda self: (threading.main_thread().join(), time.sleep(1), work(self))\n"
        "events = EventWriter(sys.argv[1])\n"
        "for step in range(3):\n"
        "    events.log(step, {'train/loss': 1.0})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert [step for step, _ in read_events(tmp_path)["train/loss"]] == [0, 1, 2]


def test_events_that_cannot_be_written_at_exit_are_reported(tmp_path):
    (tmp_path / "file").write_text("")
    program = (
        "import sys; from areno.observability.tensorboard import EventWriter\n"
        "events = EventWriter(sys.argv[1])\n"
        "events.log(0, {'train/loss': 1.0})\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "file" / "events")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert f"TensorBoard events in {arguments[-1]} are incomplete" in result.stderr


def test_a_batch_of_512_rows_takes_milliseconds():
    rng = random.Random(0)
    rows = [
        TrainSequence(
            prompt_mask=[True] * 60 + [False] * 140,
            tokens=list(range(200)),
            logprobs=[rng.random() for _ in range(200)],
            advantages=[rng.random() for _ in range(200)],
        )
        for _ in range(512)
    ]
    durations = []
    for _ in range(7):
        start = time.process_time()
        scalars(rows=rows)
        durations.append(time.process_time() - start)
    # About 13 ms when alone on a core; the bound leaves room for a busy machine.
    assert min(durations) < 0.03
