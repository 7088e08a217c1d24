"""Converts training rows to flat arrays and back. Also converts recorded samples to rows. A replay trains on saved rows again.

The per-token lists of all rows are concatenated, and ``lengths`` holds the length of each row. The floats of a per-token list
are stored as float32 or, if float32 would round a value, as float64. Rewards are stored as float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areno.storage.rollout_files import Arrays
from areno.types import PARTS, TrainSequence, WeightedReward, part_columns
from areno.types.routing import no_expert

_FLAGS = ("prompt_mask", "loss_mask", "keep")
_INTEGERS = ("tokens", "versions")
_NUMBERS = ("logprobs", "advantages", "returns", "values", "ref_logprobs", "prox_logprobs", "teacher_logprobs")
_PER_ROW = {"group": np.int32, "truncated": np.bool_, "eos_token_id": np.int32, "temperature": np.float64}
_ROUTED = "routed_experts"


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of a step, and for each row the number of its sample. Rows with equal numbers belong to one sample."""

    rows: list[TrainSequence]
    samples: list[int]


def arrays_of(rows: Sequence[TrainSequence], samples: Sequence[int]) -> Arrays:
    """Store the fields of one or more rows in arrays, and return a dict of these arrays.

    The keys are ``lengths``, ``sample``, ``reward``, the names of the reward parts, and the names of the other fields. A
    per-token list is omitted if any row lacks this list. A missing ``loss_mask`` is saved as true for all tokens.
    """
    rewards = [row.reward for row in rows]
    arrays: Arrays = {
        "lengths": np.array([len(row.tokens) for row in rows], np.int32),
        "sample": np.array(samples, np.int32),
        "reward": np.array(rewards, np.float64),
    }
    arrays |= {name: np.array(part, np.float64) for name, part in part_columns(rewards, PARTS).items()}
    arrays |= {name: np.array([getattr(row, name) for row in rows], kind) for name, kind in _PER_ROW.items()}
    flags, integers = (partial(np.array, dtype=kind) for kind in (np.bool_, np.int32))
    for names, convert in ((_FLAGS, flags), (_INTEGERS, integers), (_NUMBERS, _numbers)):
        for name in names:
            lists = [getattr(row, name) for row in rows]
            if name == "loss_mask":
                lists = [mask or [True] * len(row.tokens) for mask, row in zip(lists, rows, strict=True)]
            if all(lists):
                arrays[name] = convert(list(itertools.chain.from_iterable(lists)))
    if any(row.routed_experts is not None for row in rows):
        arrays[_ROUTED] = _routed(rows)
    return arrays


def _numbers(values: list[float]) -> NDArray[Any]:
    exact = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    return short if np.array_equal(short, exact, equal_nan=True) else exact


def _routed(rows: Sequence[TrainSequence]) -> NDArray[Any]:
    """Return the routing records of all tokens. A row without a record is filled with :func:`no_expert`."""
    like = next(row.routed_experts for row in rows if row.routed_experts is not None)

    def record(row: TrainSequence) -> NDArray[Any]:
        if row.routed_experts is not None:
            return row.routed_experts
        return np.full((len(row.tokens), *like.shape[1:]), no_expert(like), like.dtype)

    return np.concatenate([record(row) for row in rows])


def rows_of_arrays(arrays: Mapping[str, NDArray[Any]]) -> SavedRows:
    """Convert the arrays of :func:`arrays_of` back to rows."""
    cuts = np.cumsum(arrays["lengths"])[:-1]
    lists = {name: np.split(arrays[name], cuts) for name in (*_FLAGS, *_INTEGERS, *_NUMBERS) if name in arrays}
    routed = np.split(arrays[_ROUTED], cuts) if _ROUTED in arrays else [None] * len(arrays["lengths"])
    parts = {name.removeprefix(PARTS): values for name, values in arrays.items() if name.startswith(PARTS)}
    rows = []
    for index, reward in enumerate(arrays["reward"].tolist()):
        fields: dict[str, Any] = {name: values[index].tolist() for name, values in lists.items()}
        fields |= {name: arrays[name][index].item() for name in _PER_ROW}
        if parts:
            reward = WeightedReward(reward, {name: float(values[index]) for name, values in parts.items()})
        rows.append(TrainSequence(**fields, reward=reward, routed_experts=routed[index]))
    return SavedRows(rows, arrays["sample"].tolist())


def rows_of_samples(samples: Iterable[Mapping[str, Any]], temperature: float) -> SavedRows:
    """Return the training rows in recorded samples (``samples.jsonl``). Samples without rows are skipped.

    In ``samples.jsonl``, log-probs and advantages are rounded to six decimals. ``temperature`` is the run's sampling
    temperature.
    """
    rows, owners = [], []
    for number, sample in enumerate(samples):
        reward = float(sample["reward"])
        if "reward_parts" in sample:
            reward = WeightedReward(reward, {name: float(part) for name, part in sample["reward_parts"].items()})
        for segments in sample.get("rows", ()):
            rows.append(
                TrainSequence(
                    prompt_mask=[not segment["trained"] for segment in segments for _ in segment["tokens"]],
                    tokens=_joined(segments, "tokens"),
                    logprobs=[float(x) for x in _joined(segments, "logprobs")],
                    advantages=[float(x) for x in _joined(segments, "advantages")],
                    versions=[segment["version"] for segment in segments for _ in segment["tokens"]],
                    reward=reward,
                    temperature=temperature,
                    group=sample["prompt_index"],
                    truncated=sample["finish_reason"] == "length",
                )
            )
            owners.append(number)
    return SavedRows(rows, owners)


def _joined(segments: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [value for segment in segments for value in segment[name]]
