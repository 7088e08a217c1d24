"""Selects samples of each step for ``samples.jsonl``, and logs completions for ``ARENO_LOG_COMPLETIONS``.

The selection is bounded per step, so that the file of a long run stays small: the best, the worst and the first sample of
each of the first eight prompts (at most 24 records, with texts of at most 8,000 characters).
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from typing import Any, Protocol

from areno.errors import UsageError
from areno.types import RewardRecord, TrainSequence, parts_of

MAX_CHARS = 8000
LOGGED_TOKENS = 64
LOGGED_RESULTS = 4
MAX_TOKENS = 8192
"""Maximum tokens per step whose details are recorded."""

Texts = Callable[[int], tuple[str, list[int]]]
"""Returns the text and the bytes of a token."""
Decode = Callable[[Sequence[int]], str]
"""Decodes token ids, including special tokens."""
Segments = list[dict[str, Any]]
Trajectory = Callable[[], Sequence[Segments]]
"""Returns the training rows of a sample, as segments of tokens with equal attributes."""


def sample_records(
    step: int,
    records: Sequence[RewardRecord],
    rewards: Sequence[float],
    advantages: Sequence[float] | None = None,
    *,
    max_prompts: int = 8,
    trajectories: Sequence[Trajectory] | None = None,
) -> list[dict[str, Any]]:
    """Build the records for ``RunDirectory.append_samples``: best, worst and first sample of the first prompts.

    Args:
        records: all samples of the step; ``metadata`` has prompt, sample and finish reason.
        trajectories: the training rows of each sample; computed for selected samples only, and recorded up to `MAX_TOKENS`
            tokens per step.

    Returns:
        One dictionary per selected sample, in the order of ``records``: ``step, prompt_index, sample_index, picked`` (why
        it was selected: ``first``, ``best``, ``worst``), ``reward``, ``reward_parts`` if it has parts, ``advantage,
        finish_reason, response_len, logprob_mean`` (over trained tokens; None if there are none), ``prompt, completion``;
        for agents also ``messages``; and ``rows``, within the token limit.

    Raises:
        ValueError: the sequences differ in length.
    """
    if len(rewards) != len(records) or (advantages is not None and len(advantages) != len(records)):
        raise ValueError(f"{len(records)} samples require as many rewards and advantages, got {len(rewards)} rewards")
    groups: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        groups.setdefault(record.metadata.get("prompt_index", 0), []).append(i)
    picked: dict[int, list[str]] = {}
    for members in list(groups.values())[:max_prompts]:
        best, worst = max(members, key=rewards.__getitem__), min(members, key=rewards.__getitem__)
        for why, i in (("first", members[0]), ("best", best), ("worst", worst)):
            picked.setdefault(i, []).append(why)
    samples = [
        {
            "step": step,
            "prompt_index": records[i].metadata.get("prompt_index", 0),
            "sample_index": records[i].metadata.get("sample_index", 0),
            "picked": picked[i],
            "reward": rewards[i],
            **({"reward_parts": dict(parts)} if (parts := parts_of(rewards[i])) else {}),
            "advantage": None if advantages is None else advantages[i],
            "finish_reason": records[i].metadata.get("finish_reason"),
            "response_len": len(records[i].tokens),
            "logprob_mean": _logprob_mean(records[i]),
            "prompt": _bounded(records[i].prompt),
            "completion": _bounded(records[i].completion),
            **({"messages": records[i].messages} if "turns" in records[i].metadata else {}),
        }
        for i in sorted(picked)
    ]
    _add_rows(samples, [trajectories[i] for i in sorted(picked)] if trajectories is not None else [])
    return samples


def row_records(
    step: int, prompts: Sequence[int], rows: Sequence[TrainSequence], tokenizer: Any, texts: Texts
) -> list[dict[str, Any]]:
    """Return :func:`sample_records` of training rows, one sample each; ``prompts`` are the prompt indices of the groups."""
    counts: Counter[int] = Counter()
    records, advantages = [], []
    for row in rows:
        begin = row.prompt_mask.index(False) if False in row.prompt_mask else len(row.tokens)
        trained = row.trainable()[begin:]
        metadata: dict[str, Any] = {"prompt_index": prompts[row.group], "sample_index": counts[row.group]}
        metadata["finish_reason"] = "length" if row.truncated else "stop"
        counts[row.group] += 1
        records.append(
            RewardRecord(
                prompt=tokenizer.decode(row.tokens[:begin]),
                completion=tokenizer.decode(row.tokens[begin:]),
                tokens=row.tokens[begin:],
                logprobs=row.logprobs[begin:],
                loss_mask=trained,
                metadata=metadata,
            )
        )
        masked = [a for a, counted in zip(row.advantages[begin:], trained, strict=False) if counted]
        advantages.append(sum(masked) / len(masked) if masked else 0.0)
    trajectories = [partial(lambda row: [row_segments(row, texts)], row) for row in rows]
    return sample_records(step, records, [row.reward for row in rows], advantages, trajectories=trajectories)


def row_segments(
    row: TrainSequence, texts: Texts, roles: Sequence[str] | None = None, turns: Sequence[int] | None = None
) -> Segments:
    """Split a row into segments of consecutive tokens with equal attributes, as in the ``rows`` of a sample.

    Args:
        roles: role of each token; None distinguishes only sampled tokens (``text``) from others (``given``).
        turns: turn of each token; None numbers the sampled spans.

    Returns:
        Segments with the shared attributes ``role, turn, trained, version`` and the lists ``tokens, texts, logprobs,
        advantages``.
    """
    versions, advantages = row.versions or [-1] * len(row.tokens), row.advantages or [0.0] * len(row.tokens)
    sampled = [version >= 0 for version in versions]
    roles = ["text" if flag else "given" for flag in sampled] if roles is None else roles
    if turns is None:
        ends = [previous and not current for previous, current in itertools.pairwise([False, *sampled])]
        turns = list(itertools.accumulate(map(int, ends)))
    keys = zip(roles, turns, row.trainable(), versions, strict=True)
    segments: Segments = []
    last: tuple[Any, ...] | None = None
    for key, token, logprob, advantage in zip(keys, row.tokens, row.logprobs, advantages, strict=True):
        if key != last:
            segments.append(dict(zip(("role", "turn", "trained", "version"), key, strict=True)))
            segments[-1] |= {"tokens": [], "texts": [], "logprobs": [], "advantages": []}
            last = key
        segments[-1]["tokens"].append(token)
        segments[-1]["texts"].append(texts(token)[0])
        segments[-1]["logprobs"].append(round(logprob, 6))
        segments[-1]["advantages"].append(round(advantage, 6))
    return segments


def _add_rows(samples: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory]) -> None:
    budget = MAX_TOKENS
    for record, trajectory in zip(samples, trajectories, strict=False):
        rows = trajectory()
        budget -= sum(len(segment["tokens"]) for row in rows for segment in row)
        if budget < 0:
            return
        record["rows"] = rows


def completions_to_log() -> int:
    """Samples to log per step, from ``ARENO_LOG_COMPLETIONS`` (default 0). Raises UsageError if it is not an integer >= 0."""
    value = os.environ.get("ARENO_LOG_COMPLETIONS") or "0"
    if not (value.isascii() and value.isdigit()):
        raise UsageError(
            f"environment variable ARENO_LOG_COMPLETIONS: {value!r} is not a non-negative integer; "
            "set the number of samples to log per step, or 0 for none"
        )
    return int(value)


def log_completions(
    logger: Logger,
    records: Sequence[RewardRecord],
    *,
    prompt_tokens: Sequence[Sequence[int]],
    decode: Decode,
    limit: int,
) -> None:
    """Log the first ``limit`` samples, one per line."""
    for record, tokens in list(zip(records, prompt_tokens, strict=True))[:limit]:
        logger.info(
            "completion prompt_idx=%d sample_idx=%d prompt=%r decoded_prompt=%r completion=%r "
            "prompt_tokens=%s response_tokens=%s",
            record.metadata.get("prompt_index", 0),
            record.metadata.get("sample_index", 0),
            record.prompt,
            decode(tokens),
            record.completion,
            list(tokens[:LOGGED_TOKENS]),
            record.tokens[:LOGGED_TOKENS],
        )


class LoggedRow(Protocol):
    """The logged attributes of a row of an agent's sample."""

    tokens: list[int]
    sampled: list[bool]
    trained: list[bool]


def log_trajectory(logger: Logger, record: RewardRecord, *, rows: Sequence[LoggedRow], decode: Decode) -> None:
    """Log one sample of an agent on one line."""
    row = rows[0] if rows else None
    tokens, mask = (row.tokens, row.trained) if row is not None else ([], [])
    prompt = tokens[: row.sampled.index(True)] if row is not None and True in row.sampled else tokens
    logger.info(
        "completion prompt_idx=%d sample_idx=%d prompt=%r decoded_prompt=%r messages=%s final_answer=%r tool_calls=%s "
        "tool_results=%s rows=%d loss_mask_true=%d/%d first_loss_idx=%s loss_mask=%s tokens=%s",
        record.metadata.get("prompt_index", 0),
        record.metadata.get("sample_index", 0),
        record.prompt,
        decode(prompt),
        record.messages,
        record.final_answer,
        record.tool_calls,
        record.tool_results[:LOGGED_RESULTS],
        len(rows),
        sum(mask),
        len(mask),
        mask.index(True) if True in mask else None,
        [int(counts) for counts in mask[:LOGGED_TOKENS]],
        tokens[:LOGGED_TOKENS],
    )


def _logprob_mean(record: RewardRecord) -> float | None:
    mask = record.loss_mask or [True] * len(record.logprobs)
    trained = [logprob for logprob, trainable in zip(record.logprobs, mask, strict=True) if trainable]
    return sum(trained) / len(trained) if trained else None


def _bounded(text: str) -> str:
    """Keep the head and the tail of a long text."""
    if len(text) <= MAX_CHARS:
        return text
    mark = f"\n[... {len(text) - MAX_CHARS} or more characters omitted ...]\n"
    half = (MAX_CHARS - len(mark)) // 2
    return text[:half] + mark + text[len(text) - half :]
