"""The trainers' and the engine's log lines.

Special here: these strings are a contract (people grep them, and tools parse them), so they are written in one place
and tested literally. Each function takes the logger of the class that speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import Logger
from typing import Any, Literal

Role = Literal["policy", "actor", "critic"]
ScoreKind = Literal["logprob_score", "old_logprob_score", "value_score", "score"]


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


def train_start(
    logger: Logger, epoch: int, step: int, role: Role = "policy", rows: int | None = None, pairs: int | None = None
) -> None:
    """``epoch=0 step=0 role=policy stage=train_start``, and `` rows=8`` (SFT) or `` pairs=4`` (DPO) where given."""
    _train(logger, epoch, step, role, "train_start", rows, pairs)


def train_end(
    logger: Logger, epoch: int, step: int, role: Role = "policy", rows: int | None = None, pairs: int | None = None
) -> None:
    """``epoch=0 step=0 role=policy stage=train_end``, and `` rows=8`` (SFT) or `` pairs=4`` (DPO) where given."""
    _train(logger, epoch, step, role, "train_end", rows, pairs)


def train_skip(logger: Logger, epoch: int, step: int, role: Role = "actor") -> None:
    """``epoch=0 step=0 role=actor stage=train_skip``: a critic warm-up step leaves the policy alone."""
    logger.info("epoch=%d step=%d role=%s stage=train_skip", epoch, step, role)


def role_init_start(logger: Logger, role: str, trainable: bool, path: str) -> None:
    """``role=ref stage=init_start trainable=False path=...``."""
    logger.info("role=%s stage=init_start trainable=%s path=%s", role, trainable, path)


def role_init_end(logger: Logger, role: str) -> None:
    """``role=ref stage=init_end``."""
    logger.info("role=%s stage=init_end", role)


def score_start(logger: Logger, role: str, kind: ScoreKind, rows: int) -> None:
    """``role=ref stage=logprob_score_start rows=8``; a reward model's stage is ``score_start``."""
    logger.info("role=%s stage=%s_start rows=%d", role, kind, rows)


def score_end(logger: Logger, role: str, kind: ScoreKind, rows: int) -> None:
    """``role=ref stage=logprob_score_end rows=8``."""
    logger.info("role=%s stage=%s_end rows=%d", role, kind, rows)


def critic_value_loss(logger: Logger, epoch: int, step: int, value: float) -> None:
    """``epoch=0 step=0 role=critic metric=value_loss value=0.250000``."""
    logger.info("epoch=%d step=%d role=critic metric=value_loss value=%.6f", epoch, step, value)


def _train(
    logger: Logger, epoch: int, step: int, role: Role, stage: str, rows: int | None, pairs: int | None = None
) -> None:
    suffix = "" if rows is None else f" rows={rows}"
    suffix += "" if pairs is None else f" pairs={pairs}"
    logger.info("epoch=%d step=%d role=%s stage=%s%s", epoch, step, role, stage, suffix)


def reward_mean(logger: Logger, epoch: int, step: int, value: float) -> None:
    """``epoch=0 step=0 metric=reward_mean value=0.125000``."""
    logger.info("epoch=%d step=%d metric=reward_mean value=%.6f", epoch, step, value)


def rollout_logprob_mean(logger: Logger, epoch: int, step: int, value: float) -> None:
    """``epoch=0 step=0 metric=rollout_logprob_mean value=-0.174560``."""
    logger.info("epoch=%d step=%d metric=rollout_logprob_mean value=%.6f", epoch, step, value)


def rounded(stats: Mapping[str, Any]) -> dict[str, Any]:
    """For people: floats with six significant digits; ``metrics.jsonl`` has all of them."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in stats.items()}


def train_stats(logger: Logger, epoch: int, step: int, stats: Mapping[str, Any]) -> None:
    """``epoch=0 step=0 train_stats={'loss': 0.0, ...}``, a Python dictionary; numbers have six digits."""
    logger.info("epoch=%d step=%d train_stats=%s", epoch, step, rounded(stats))


def evaluation(logger: Logger, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
    """``epoch=0 step=20 eval={'loss': 0.5, ...}``, as ``train_stats``; here ``step`` counts the completed steps."""
    logger.info("epoch=%d step=%d eval=%s", epoch, step, rounded(metrics))


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


def pair_dataset_filter(logger: Logger, algo: str, skipped: int) -> None:
    """``stage=dpo_dataset_filter skipped_invalid_or_long=0``, and the same of other algorithms on pairs."""
    logger.info("stage=%s_dataset_filter skipped_invalid_or_long=%d", algo, skipped)


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


def agentic_rollout_batch(logger: Logger, prompts: int, n_samples: int, max_running_prompts: int) -> None:
    """``agentic rollout batch prompts=2 n_samples=8 expected_requests=16 max_running_prompts=16``."""
    logger.info(
        "agentic rollout batch prompts=%d n_samples=%d expected_requests=%d max_running_prompts=%d",
        *(prompts, n_samples, prompts * n_samples, max_running_prompts),
    )


def agentic_train_batch(
    logger: Logger, samples: int, tokens: int, messages: int, tool_calls: int, tool_results: int
) -> None:
    """``agentic train batch built samples=16 tokens=2233 messages=242 tool_calls=133 tool_results=97``."""
    logger.info(
        "agentic train batch built samples=%d tokens=%d messages=%d tool_calls=%d tool_results=%d",
        *(samples, tokens, messages, tool_calls, tool_results),
    )


def agentic_filtered(
    logger: Logger, max_context_len: int | None, total: int, lengths: Sequence[int], top: Sequence[Mapping[str, Any]]
) -> None:
    """``agentic trajectory filtered: max_context_len=512 total=16 kept=15 filtered=1 tokens[min/p50/p90/max]=...``."""
    ordered = sorted(lengths)
    marks = [
        ordered[0],
        *(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90)),
        ordered[-1],
    ]
    logger.warning(
        "agentic trajectory filtered: max_context_len=%s total=%d kept=%d filtered=%d tokens[min/p50/p90/max]=%s top=%s",
        *(max_context_len, total, total - len(ordered), len(ordered), "/".join(map(str, marks))),
        "[" + "; ".join(" ".join(f"{name}={value!r}" for name, value in one.items()) for one in top) + "]",
    )
