"""The trainers' and the engine's log lines.

Special here: these strings are a contract (people grep them, and tools parse them), so they are written in one place
and tested literally. Each function takes the logger of the class that speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import Logger
from typing import Any, Literal

Role = Literal["policy", "actor"]


def epoch_start(logger: Logger, epoch: int) -> None:
    """``epoch=0 stage=epoch_start``."""
    logger.info("epoch=%d stage=epoch_start", epoch)


def epoch_end(logger: Logger, epoch: int) -> None:
    """``epoch=0 stage=epoch_end``."""
    logger.info("epoch=%d stage=epoch_end", epoch)


def rollout_start(logger: Logger, epoch: int, step: int, role: Role = "policy") -> None:
    """``epoch=0 step=0 role=policy stage=rollout_start``."""
    logger.info("epoch=%d step=%d role=%s stage=rollout_start", epoch, step, role)


def rollout_end(logger: Logger, epoch: int, step: int, role: Role = "policy") -> None:
    """``epoch=0 step=0 role=policy stage=rollout_end``."""
    logger.info("epoch=%d step=%d role=%s stage=rollout_end", epoch, step, role)


def train_start(logger: Logger, epoch: int, step: int, role: Role = "policy", rows: int | None = None) -> None:
    """``epoch=0 step=0 role=policy stage=train_start``, and `` rows=8`` where rows are given (SFT)."""
    _train(logger, epoch, step, role, "train_start", rows)


def train_end(logger: Logger, epoch: int, step: int, role: Role = "policy", rows: int | None = None) -> None:
    """``epoch=0 step=0 role=policy stage=train_end``, and `` rows=8`` where rows are given (SFT)."""
    _train(logger, epoch, step, role, "train_end", rows)


def _train(logger: Logger, epoch: int, step: int, role: Role, stage: str, rows: int | None) -> None:
    suffix = "" if rows is None else f" rows={rows}"
    logger.info("epoch=%d step=%d role=%s stage=%s%s", epoch, step, role, stage, suffix)


def reward_mean(logger: Logger, epoch: int, step: int, value: float) -> None:
    """``epoch=0 step=0 metric=reward_mean value=0.125000``."""
    logger.info("epoch=%d step=%d metric=reward_mean value=%.6f", epoch, step, value)


def rollout_logprob_mean(logger: Logger, epoch: int, step: int, value: float) -> None:
    """``epoch=0 step=0 metric=rollout_logprob_mean value=-0.174560``."""
    logger.info("epoch=%d step=%d metric=rollout_logprob_mean value=%.6f", epoch, step, value)


def train_stats(logger: Logger, epoch: int, step: int, stats: Mapping[str, Any]) -> None:
    """``epoch=0 step=0 train_stats={'loss': 0.0, ...}``, a Python dictionary."""
    logger.info("epoch=%d step=%d train_stats=%s", epoch, step, dict(stats))


def max_steps_reached(logger: Logger, epoch: int, step: int) -> None:
    """``epoch=0 step=0 stage=max_steps_reached``."""
    logger.info("epoch=%d step=%d stage=max_steps_reached", epoch, step)


def save_checkpoint_start(logger: Logger, epoch: int, step: int, path: object) -> None:
    """``epoch=0 step=0 stage=save_checkpoint_start path=...``."""
    logger.info("epoch=%d step=%d stage=save_checkpoint_start path=%s", epoch, step, path)


def save_checkpoint_end(logger: Logger, epoch: int, step: int, path: object) -> None:
    """``epoch=0 step=0 stage=save_checkpoint_end path=...``."""
    logger.info("epoch=%d step=%d stage=save_checkpoint_end path=%s", epoch, step, path)


def sft_dataset_filter(logger: Logger, skipped: int) -> None:
    """``stage=sft_dataset_filter skipped_long_or_empty=0``."""
    logger.info("stage=sft_dataset_filter skipped_long_or_empty=%d", skipped)


def backend_time(logger: Logger, rollout_s: float, train_s: float, total_s: float) -> None:
    """``time rollout=213.929721 train=17.327612 total=231.297132``, in seconds; the backend's logger."""
    logger.info("time rollout=%.6f train=%.6f total=%.6f", rollout_s, train_s, total_s)


def decode_progress(
    logger: Logger, dp_rank: int, dp_size: int, active: int, cuda_graph: bool, tokens_per_second: float
) -> None:
    """``rollout decode progress: dp=0/2 active=6 cuda_graph=True tokens_per_second=60.8``; the engine's logger."""
    logger.info(
        "rollout decode progress: dp=%d/%d active=%d cuda_graph=%s tokens_per_second=%.1f",
        *(dp_rank, dp_size, active, cuda_graph, tokens_per_second),
    )
