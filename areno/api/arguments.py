"""Checks of what a program gives to the SDK: a wrong argument is refused where it was given, by its name.

All raise TypeError for a value of the wrong kind, and ValueError for one that is out of its bounds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

from areno.engine.limits import unknown_id
from areno.errors import UsageError
from areno.types import SamplingParams, TrainSequence, tightest


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def real(name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """A finite number, more than ``above`` and at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value <= above or value < least:
        bound = f" and above {above:g}" if above > -math.inf else " and not negative" if least == 0 else ""
        raise ValueError(f"{name} must be finite{bound}, got {value}")
    return float(value)


def listed(name: str, value: Any, of: str) -> list[Any]:
    """The elements of a list, tuple or array; a text is none."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {of}, got {type(value).__name__} {value!r:.60}")
    return list(value)


def of_type(name: str, value: Any, kind: Any) -> None:
    """Check the class of an object."""
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__} {value!r:.60}")


def sampling(value: Any) -> SamplingParams:
    """Generation controls."""
    of_type("sampling_params", value, SamplingParams)
    return value  # type: ignore[no-any-return]


def function(name: str, value: Any) -> None:
    """Check that something can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


def texts(values: Any) -> list[Any]:
    """Prompts as texts, or as lists of chat messages."""
    found = listed("prompts", values, "texts; one text is given as [text]")
    for index, prompt in enumerate(found):
        of_type(f"prompts[{index}]", prompt, str | list)
    return found


def dataset(rows: Any) -> Sequence[Any]:
    """Rows that can be counted and indexed."""
    if isinstance(rows, str | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise TypeError(
            f"dataset must be rows that support len() and rows[i], got {type(rows).__name__} {rows!r:.60}; "
            "areno.api.datasets.load_rows reads a file"
        )
    return rows  # type: ignore[no-any-return]


def batch_sizes(mini_bs: Any, accumulation: Any) -> tuple[int, int | None]:
    """``mini_bs`` and ``gradient_accumulation_steps``."""
    return whole("mini_bs", mini_bs), (
        None if accumulation is None else whole("gradient_accumulation_steps", accumulation)
    )


def temperatures(values: Any) -> float | list[float]:
    """One temperature, or one per row."""
    if isinstance(values, Real):
        return real("temperatures", values, above=0)
    return [real("temperatures", value, above=0) for value in listed("temperatures", values, "numbers, or a number")]


def token_ids(name: str, prompt: Any) -> list[int]:
    """Token ids from a list, an array, or an object with ``input_ids`` or ``ids``."""
    for attribute in ("input_ids", "ids"):
        if hasattr(prompt, attribute):
            prompt = getattr(prompt, attribute)
            break
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    ids = listed(name, prompt, "token ids")
    if set(map(type, ids)) == {int}:
        return ids
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise TypeError(f"{name} must be a list of token ids, got {ids!r:.60}")
    return [int(token) for token in ids]


def prompts(values: Any, params: SamplingParams, *, context: int | None, vocabulary: int | None) -> list[list[int]]:
    """One list of token ids per prompt, which a model of this context and vocabulary (None: unknown) can read.

    Raises UsageError: a prompt is empty, too long, or holds an id that the model does not know.
    """
    found = [
        token_ids(f"prompt {i}", value) for i, value in enumerate(listed("prompt_tokens", values, "token id lists"))
    ]
    longest, limit = params.max_prompt_len, tightest(params.max_context_len, context)
    for index, prompt in enumerate(found):
        if not prompt:
            raise UsageError(f"prompt {index} is empty; a prompt needs at least one token")
        if longest is not None and len(prompt) > longest:
            raise UsageError(f"prompt {index} has {len(prompt)} tokens, more than max_prompt_len={longest}")
        if limit is not None and len(prompt) >= limit:
            raise UsageError(
                f"prompt {index} has {len(prompt)} tokens, which leave no room for an answer in a context of {limit} (the "
                "model's limit, or max_context_len); leave such prompts out, load_prompt_batches(max_prompt_tokens=...) does"
            )
        if vocabulary is not None and (wrong := unknown_id(prompt, vocabulary)) is not None:
            raise UsageError(
                f"prompt {index} holds token id {wrong}, and the model has the ids 0 to {vocabulary - 1}; encode it with "
                "trainer.get_tokenizer()"
            )
    return found


def seed_table(values: Any, prompts: int, samples: int) -> list[list[int]]:
    """One list of ``samples`` seeds per prompt."""
    found = [[int(seed) for seed in listed("seeds", row, "seeds")] for row in listed("seeds", values, "lists of seeds")]
    if len(found) != prompts or any(len(row) != samples for row in found):
        shape = sorted({len(row) for row in found})
        raise ValueError(
            f"seeds must hold {samples} seeds for each of {prompts} prompts, got {len(found)} lists of {shape}"
        )
    return found


def train_rows(values: Any) -> list[TrainSequence]:
    """Rows to train on."""
    rows = listed("batch_data", values, "TrainSequence rows")
    for index, row in enumerate(rows):
        of_type(f"batch_data[{index}]", row, TrainSequence)
    return rows


def refuse_unknown_temperatures(rows: Sequence[TrainSequence], sampled_at: Set[float]) -> None:
    """Raise :class:`UsageError` for log-probs of unknown temperature where others than 1 were sampled at."""
    unknown = [index for index, row in enumerate(rows) if row.logprobs and not row.knows_temperature]
    if unknown and sampled_at - {1.0}:
        told = ", ".join(f"{temperature:g}" for temperature in sorted(sampled_at))
        raise UsageError(
            f"row {unknown[0]} does not say which temperature its logprobs were sampled at, and this trainer has generated "
            f"at {told}; give TrainSequence(temperature=sequence.temperature), or make its logprobs by adding lists, "
            "[0.0] * len(prompt) + sequence.resp_logprobs, which take the temperature along"
        )


def token_rows(values: Any) -> Sequence[list[int]]:
    """Rows to score."""
    return [token_ids(f"token_rows[{index}]", row) for index, row in enumerate(listed("token_rows", values, "rows"))]
