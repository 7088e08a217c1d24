"""Defines the documented log lines of the trainers and the engine.

Users search for the documented lines, and tools parse the lines. So this module defines all of them, and tests check their
text. Each function takes the caller's logger and the values of the line.
"""

from collections.abc import Callable, Mapping, Sequence
from logging import Logger
from typing import Any, Literal

Role = Literal["policy", "actor", "critic"]
ScoreKind = Literal["logprob_score", "old_logprob_score", "value_score", "score"]


def _line(form: str) -> Callable[..., None]:

    def write(logger: Logger, *values: object) -> None:
        logger.info(form, *values)

    return write


def _stage(name: str, default_role: Role = "policy") -> Callable[..., None]:

    def write(
        logger: Logger,
        epoch: int,
        step: int,
        role: Role = default_role,
        rows: int | None = None,
        pairs: int | None = None,
    ) -> None:
        suffix = "".join(f" {unit}={n}" for unit, n in (("rows", rows), ("pairs", pairs)) if n is not None)
        logger.info("epoch=%d step=%d role=%s stage=%s%s", epoch, step, role, name, suffix)

    return write


epoch_start = _line("epoch=%d stage=epoch_start")
epoch_end = _line("epoch=%d stage=epoch_end")
rollout_start, rollout_end = _stage("rollout_start"), _stage("rollout_end")
train_start, train_end = _stage("train_start"), _stage("train_end")
train_skip = _stage("train_skip", "actor")  # a critic warm-up step does not train the policy
max_steps_reached = _line("epoch=%d step=%d stage=max_steps_reached")
save_checkpoint_start = _line("epoch=%d step=%d stage=save_checkpoint_start path=%s")
save_checkpoint_end = _line("epoch=%d step=%d stage=save_checkpoint_end path=%s")
sft_dataset_filter = _line("stage=sft_dataset_filter skipped_long_or_empty=%d")
pair_dataset_filter = _line("stage=%s_dataset_filter skipped_invalid_or_long=%d")  # %s: the algorithm
role_init_start = _line("role=%s stage=init_start trainable=%s path=%s")
role_init_end = _line("role=%s stage=init_end")
score_start = _line("role=%s stage=%s_start rows=%d")  # second %s: a ScoreKind
score_end = _line("role=%s stage=%s_end rows=%d")
critic_value_loss = _line("epoch=%d step=%d role=critic metric=value_loss value=%.6f")
reward_mean = _line("epoch=%d step=%d metric=reward_mean value=%.6f")
rollout_logprob_mean = _line("epoch=%d step=%d metric=rollout_logprob_mean value=%.6f")
backend_time = _line("time rollout=%.6f train=%.6f total=%.6f")  # seconds; the backend's logger
# Data-parallel rank and size, active sequences; the engine's logger.
decode_progress = _line("rollout decode progress: dp=%d/%d active=%d cuda_graph=%s tokens_per_second=%.1f")
agentic_train_batch = _line("agentic train batch built samples=%d tokens=%d messages=%d tool_calls=%d tool_results=%d")


def rounded(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Round floats to six significant digits for the log; ``metrics.jsonl`` has full precision."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in stats.items()}


def train_stats(logger: Logger, epoch: int, step: int, stats: Mapping[str, Any]) -> None:
    """Log ``epoch=0 step=0 train_stats={'loss': 0.0, ...}``, a Python dictionary with rounded numbers."""
    logger.info("epoch=%d step=%d train_stats=%s", epoch, step, rounded(stats))


def evaluation(logger: Logger, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
    """Log ``epoch=0 step=20 eval={'loss': 0.5, ...}`` with rounded numbers. ``step`` is the number of completed steps."""
    logger.info("epoch=%d step=%d eval=%s", epoch, step, rounded(metrics))


def agentic_rollout_batch(logger: Logger, prompts: int, n_samples: int, max_running_prompts: int) -> None:
    """Log ``agentic rollout batch prompts=2 n_samples=8 expected_requests=16 max_running_prompts=16``."""
    logger.info(
        "agentic rollout batch prompts=%d n_samples=%d expected_requests=%d max_running_prompts=%d",
        *(prompts, n_samples, prompts * n_samples, max_running_prompts),
    )


def agentic_filtered(
    logger: Logger, max_context_len: int | None, total: int, lengths: Sequence[int], top: Sequence[Mapping[str, Any]]
) -> None:
    """Log ``agentic trajectory filtered: max_context_len=512 total=16 kept=15 filtered=1 tokens[min/p50/p90/max]=...``.

    ``lengths`` has the token count of each removed trajectory, and must not be empty. ``top`` describes the longest removed
    trajectories.
    """
    ordered = sorted(lengths)
    percentiles = (ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 90))
    logger.warning(
        "agentic trajectory filtered: max_context_len=%s total=%d kept=%d filtered=%d tokens[min/p50/p90/max]=%s top=%s",
        *(max_context_len, total, total - len(ordered), len(ordered)),
        "/".join(map(str, (ordered[0], *percentiles, ordered[-1]))),
        "[" + "; ".join(" ".join(f"{name}={value!r}" for name, value in one.items()) for one in top) + "]",
    )
