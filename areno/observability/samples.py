"""Selects samples of each step for ``samples.jsonl``, and logs samples if ``ARENO_LOG_COMPLETIONS`` is set.

For each of the first eight prompts of a step, the best, the worst and the first sample are selected. So a step adds at most 24
records. Prompts and completions are shortened to at most 8,000 characters.
"""

import itertools
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import Logger
from typing import Any, Protocol

from areno.errors import UsageError
from areno.text.data_rows import PROMPT_FIELDS
from areno.types import RewardRecord, TokenRecord, TrainSequence, parts_of

MAX_CHARS = 8000
_MARK_CHARS = 40
LOGGED_TOKENS = 64
LOGGED_RESULTS = 4
_DATA_CHARS, _DATA_FIELDS = 500, 8
_TEXT = reprlib.Repr()  # bounds nested values without formatting all of them
_TEXT.maxstring = _TEXT.maxother = _DATA_CHARS
PICKED_PROMPTS = 8
"""Maximum number of prompts per step whose samples are recorded."""
EVAL_PROMPTS = 8
"""Maximum number of prompts whose first answer is recorded in each evaluation, to compare answers over the run."""
MAX_TOKENS = 8192
"""Maximum number of tokens per step that are recorded individually, for example with their log-probs."""

Texts = Callable[[int], tuple[str, list[int]]]
"""Function that returns the text and the bytes of a token."""
Decode = Callable[[Sequence[int]], str]
"""Function that decodes token ids, including special tokens."""
Segments = list[dict[str, Any]]
Trajectory = Callable[[], Sequence[Segments]]
"""Function that returns the training rows of a sample. Each row is a list of segments.

A segment is a range of consecutive tokens with equal attributes, such as the loss mask.
"""


def sample_records(
    step: int,
    records: Sequence[RewardRecord],
    rewards: Sequence[float],
    advantages: Sequence[float] | None = None,
    *,
    trajectories: Sequence[Trajectory] | None = None,
) -> list[dict[str, Any]]:
    """Build the records for ``RunDirectory.append_samples`` from the samples that :func:`pick` selects.

    Args:
        records: all samples of the step. Their ``metadata`` has the prompt index, the sample index and the finish reason.
        trajectories: for each sample, a function that returns its training rows. Only the functions of selected samples are
            called. Rows are recorded sample by sample, until the next sample would exceed ``MAX_TOKENS`` tokens in total.

    Returns:
        One dictionary per selected sample, in the order of ``records``. Each dictionary has ``step, prompt_index,
        sample_index``, ``picked`` (the reasons for the selection: ``first``, ``best``, ``worst``), ``reward``, ``advantage``,
        ``finish_reason``, ``response_len``, ``logprob_mean`` (over trained tokens; None without trained tokens), ``prompt``
        and ``completion``. Optional entries are ``reward_parts``, ``data`` (other fields of the data row as text),
        ``messages`` (only for agents) and ``rows`` (training rows; missing after the token limit is reached).

    Raises:
        ValueError: ``records``, ``rewards`` and ``advantages`` differ in length.
    """
    if len(rewards) != len(records) or (advantages is not None and len(advantages) != len(records)):
        raise ValueError(
            f"got {len(records)} samples, {len(rewards)} rewards and {len(advantages or ())} advantages; pass one reward and, "
            "if advantages are passed, one advantage per sample"
        )
    picked = pick([record.metadata.get("prompt_index", 0) for record in records], rewards)
    samples = [
        {
            "step": step,
            "prompt_index": records[i].metadata.get("prompt_index", 0),
            "sample_index": records[i].metadata.get("sample_index", 0),
            "picked": picked[i],
            "advantage": None if advantages is None else advantages[i],
            "logprob_mean": _logprob_mean(records[i]),
            **_rewarded(records[i], rewards[i]),
            **({"messages": records[i].messages} if "turns" in records[i].metadata else {}),
        }
        for i in sorted(picked)
    ]
    _add_rows(samples, [trajectories[i] for i in sorted(picked)] if trajectories is not None else [])
    return samples


def pick(prompts: Sequence[int], rewards: Sequence[float]) -> dict[int, list[str]]:
    """Select the first, the best and the worst sample of each prompt.

    Samples are selected only for the first ``PICKED_PROMPTS`` different prompts.

    Args:
        prompts: the prompt index of each sample.
        rewards: the reward of each sample.

    Returns:
        A dictionary. Each key is the index of a selected sample, and the value is the list of reasons for the selection.
    """
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(i)
    picked: dict[int, list[str]] = {}
    for members in list(groups.values())[:PICKED_PROMPTS]:
        best, worst = max(members, key=rewards.__getitem__), min(members, key=rewards.__getitem__)
        for why, i in (("first", members[0]), ("best", best), ("worst", worst)):
            picked.setdefault(i, []).append(why)
    return picked


def observe(prompts: Sequence[int], rewards: Sequence[float], rows: Sequence[Sequence[TrainSequence]]) -> None:
    """Assign consecutive numbers to the training rows of the samples that :func:`pick` selects.

    The numbering stops before the first sample that would exceed a total of ``MAX_TOKENS`` tokens. For the numbered rows, the
    engine records the log-prob of each token, and whether clipping removed the token's gradient.

    Args:
        prompts: the prompt index of each sample.
        rewards: the reward of each sample.
        rows: the training rows of each sample. The attribute ``observed`` of a row is set to the number of the row.
    """
    picked = [rows[i] for i in sorted(pick(prompts, rewards))]
    sizes = (sum(len(row.tokens) for row in sample_rows) for sample_rows in picked)
    recorded = itertools.takewhile(lambda total: total <= MAX_TOKENS, itertools.accumulate(sizes))
    for number, row in enumerate(itertools.chain.from_iterable(picked[: len(list(recorded))])):
        row.observed = number


def row_records(
    step: int,
    prompts: Sequence[int],
    rows: Sequence[TrainSequence],
    tokenizer: Any,
    texts: Texts,
    computed: Mapping[int, TokenRecord],
    data: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Build the same records as :func:`sample_records`, but from training rows. Each row is one sample.

    Args:
        prompts: prompt index of each group (see :func:`reward_records`).
        computed: values that training computed for the tokens of a row. The key is the number that :func:`observe` assigned
            to the row.
        data: data row of each group; empty if the data rows are unknown.
    """
    advantages = []
    for row in rows:
        masked = list(itertools.compress(row.advantages, row.trainable()))
        advantages.append(sum(masked) / len(masked) if masked else 0.0)
    records = reward_records(prompts, rows, tokenizer, data)
    trajectories = [
        partial(lambda row: [row_segments(row, texts, computed=computed.get(row.observed))], row) for row in rows
    ]
    return sample_records(step, records, [row.reward for row in rows], advantages, trajectories=trajectories)


def reward_records(
    prompts: Sequence[int], rows: Sequence[TrainSequence], tokenizer: Any, data: Sequence[Mapping[str, Any]] = ()
) -> list[RewardRecord]:
    """Convert training rows to samples.

    Rows with the same ``row.group`` have the same prompt: ``prompts[group]`` is the index of the prompt, and ``data[group]`` is
    its data row. If ``data`` is empty, the samples have no data row.
    """
    counts: Counter[int] = Counter()
    records = []
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
                source_record=dict(data[row.group]) if data else {},
                metadata=metadata,
            )
        )
    return records


def row_segments(
    row: TrainSequence,
    texts: Texts,
    roles: Sequence[str] | None = None,
    turns: Sequence[int] | None = None,
    computed: TokenRecord | None = None,
) -> Segments:
    """Split a training row into segments of consecutive tokens with equal attributes.

    In ``samples.jsonl``, the field ``rows`` of a sample contains the segments of its training rows.

    Args:
        roles: role of each token. None means ``text`` for sampled tokens and ``given`` for other tokens.
        turns: turn number of each token. None means that a turn ends after each span of sampled tokens.
        computed: values that training computed for the tokens of the row.

    Returns:
        Segments, each with the attributes ``role, turn, trained, version`` of its tokens and the lists ``tokens, texts,
        logprobs, advantages``. With ``computed``, each segment also has the list ``train_logprobs``, and the list ``clipped``
        if the loss clips. The entries of these two lists are None for tokens that are not trained.
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
    if computed is not None:
        _add_computed(segments, computed)
    return segments


def _add_computed(segments: Segments, computed: TokenRecord) -> None:
    columns: dict[str, list[Any]] = {"train_logprobs": [round(value, 6) for value in computed.logprobs]}
    if computed.clipped is not None:
        columns["clipped"] = computed.clipped
    start = 0
    for segment in segments:
        end = start + len(segment["tokens"])
        for name, values in columns.items():
            segment[name] = values[start:end] if segment["trained"] else [None] * (end - start)
        start = end


class EvalSamples:
    """Collects the first answer to each of the first prompts of an evaluation, for ``RunDirectory.append_eval_samples``."""

    def __init__(self) -> None:
        self._samples: dict[int, dict[str, Any]] = {}

    def add(self, records: Sequence[RewardRecord], rewards: Sequence[float | None]) -> None:
        """Add scored answers. The ``metadata`` of each record has the prompt index, the sample index and the finish reason."""
        for record, reward in zip(records, rewards, strict=True):
            index = int(record.metadata.get("prompt_index", 0))
            if index in self._samples or len(self._samples) == EVAL_PROMPTS or record.metadata.get("sample_index", 0):
                continue
            self._samples[index] = {"prompt_index": index, **_rewarded(record, reward)}

    def records(self, step: int) -> list[dict[str, Any]]:
        """Return the records of the collected answers. ``step`` is the number of training steps before the evaluation."""
        return [{"step": step, **sample} for sample in self._samples.values()]


def _add_rows(samples: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory]) -> None:
    budget = MAX_TOKENS
    for record, trajectory in zip(samples, trajectories, strict=False):
        rows = trajectory()
        budget -= sum(len(segment["tokens"]) for row in rows for segment in row)
        if budget < 0:
            return
        record["rows"] = rows


def completions_to_log() -> int:
    """Return the number of samples to log per step: the value of ``ARENO_LOG_COMPLETIONS``, by default 0.

    Raises UsageError if the value is invalid.
    """
    value = os.environ.get("ARENO_LOG_COMPLETIONS") or "0"
    if not (value.isascii() and value.isdigit()):
        raise UsageError(
            f"environment variable ARENO_LOG_COMPLETIONS must be an integer of at least 0, but is {value!r}; "
            "set the variable to the number of samples to log per step"
        )
    return int(value)


def log_completions(
    logger: Logger,
    records: Sequence[RewardRecord],
    *,
    prompt_tokens: Sequence[Sequence[int]],
    decode: Decode,
) -> None:
    """Log each sample on one line."""
    for record, tokens in zip(records, prompt_tokens, strict=True):
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
    """The logged attributes of an agent's training row."""

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


def _rewarded(record: RewardRecord, reward: float | None) -> dict[str, Any]:
    parts = parts_of(reward)
    return {
        "reward": reward,
        **({"reward_parts": dict(parts)} if parts else {}),
        "finish_reason": record.metadata.get("finish_reason"),
        "response_len": len(record.tokens),
        "prompt": bounded(record.prompt),
        "completion": bounded(record.completion),
        **_data(record),
    }


def _data(record: RewardRecord) -> dict[str, Any]:
    fields = {
        str(name): bounded(value if isinstance(value, str) else _TEXT.repr(value), _DATA_CHARS - _MARK_CHARS)
        for name, value in record.source_record.items()
        if name not in PROMPT_FIELDS and isinstance(value, str | int | float | list | tuple | dict)
    }
    return {"data": dict(itertools.islice(fields.items(), _DATA_FIELDS))} if fields else {}


def bounded(text: Any, limit: int = MAX_CHARS - _MARK_CHARS) -> str:
    """Shorten a text of more than ``limit`` characters to its beginning and its end, with a mark in between.

    The beginning and the end have ``limit`` characters together, and the mark has at most 40 characters.
    """
    text, half = "" if text is None else str(text), limit // 2
    if len(text) <= limit:
        return text
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters omitted …]\n{text[-half:]}"
