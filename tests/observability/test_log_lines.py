"""Log lines whose exact text is a contract."""

import logging

import pytest

from areno.engine import inference
from areno.observability import log_lines

logger = logging.getLogger("areno.tests.log_lines")

LINES = [
    (log_lines.epoch_start, (2,), "epoch=2 stage=epoch_start"),
    (log_lines.epoch_end, (2,), "epoch=2 stage=epoch_end"),
    (log_lines.rollout_start, (0, 3), "epoch=0 step=3 role=policy stage=rollout_start"),
    (log_lines.rollout_end, (0, 3), "epoch=0 step=3 role=policy stage=rollout_end"),
    (log_lines.rollout_start, (0, 3, "actor"), "epoch=0 step=3 role=actor stage=rollout_start"),
    (log_lines.train_start, (0, 3), "epoch=0 step=3 role=policy stage=train_start"),
    (log_lines.train_end, (0, 3), "epoch=0 step=3 role=policy stage=train_end"),
    (log_lines.train_start, (0, 3, "policy", 8), "epoch=0 step=3 role=policy stage=train_start rows=8"),
    (log_lines.train_end, (0, 3, "policy", 8), "epoch=0 step=3 role=policy stage=train_end rows=8"),
    (log_lines.reward_mean, (0, 3, 0.125), "epoch=0 step=3 metric=reward_mean value=0.125000"),
    (
        log_lines.rollout_logprob_mean,
        (0, 3, -0.17456013709306717),
        "epoch=0 step=3 metric=rollout_logprob_mean value=-0.174560",
    ),
    (
        log_lines.train_stats,
        (0, 3, {"loss": 0.0, "lr": 1e-06, "train_logprobs_mean": -0.2500366196036339, "rows": 12345678}),
        "epoch=0 step=3 train_stats={'loss': 0.0, 'lr': 1e-06, 'train_logprobs_mean': -0.250037, 'rows': 12345678}",
    ),
    (log_lines.max_steps_reached, (0, 3), "epoch=0 step=3 stage=max_steps_reached"),
    (
        log_lines.save_checkpoint_start,
        (0, 3, "runs/a/checkpoints/step_000004"),
        "epoch=0 step=3 stage=save_checkpoint_start path=runs/a/checkpoints/step_000004",
    ),
    (
        log_lines.save_checkpoint_end,
        (0, 3, "runs/a/checkpoints/step_000004"),
        "epoch=0 step=3 stage=save_checkpoint_end path=runs/a/checkpoints/step_000004",
    ),
    (log_lines.sft_dataset_filter, (17,), "stage=sft_dataset_filter skipped_long_or_empty=17"),
    (
        log_lines.backend_time,
        (213.929721, 17.327612, 231.297132),
        "time rollout=213.929721 train=17.327612 total=231.297132",
    ),
    (
        log_lines.decode_progress,
        (0, 2, 6, True, 60.8),
        "rollout decode progress: dp=0/2 active=6 cuda_graph=True tokens_per_second=60.8",
    ),
]


@pytest.mark.parametrize(("emit", "arguments", "line"), LINES, ids=[line[2][:50] for line in LINES])
def test_line_is_as_documented(caplog, emit, arguments, line):
    with caplog.at_level(logging.INFO, logger="areno"):
        emit(logger, *arguments)
    assert caplog.messages == [line]
    assert (caplog.records[0].levelname, caplog.records[0].name) == ("INFO", logger.name)


def test_decode_throughput_counts_only_steps_of_known_duration(caplog, monkeypatch):
    """Steps end at 1 s, 2 s and 3 s, each with 10 tokens; 100 s later, generation continues."""
    times = iter([1.0, 2.0, 3.0, 103.0, 105.0])
    monkeypatch.setattr(inference.time, "perf_counter", lambda: next(times))
    progress = inference.DecodeProgress(2.0)
    with caplog.at_level(logging.INFO, logger="areno"):
        for _ in range(3):
            progress.step(10)
        progress.idle()
        for _ in range(2):
            progress.step(10)
    assert [message.rpartition("=")[2] for message in caplog.messages] == ["10.0", "5.0"]
