"""Checks the arguments of the SDK. A wrong type raises TypeError, and a value out of bounds raises ValueError."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

from areno.engine.limits import unknown_id
from areno.errors import UsageError
from areno.types import SamplingParams, TrainSequence, tightest


def integer(name: str, value: Any, minimum: int = 1) -> int:
    """Check that ``value`` is an integer of at least ``minimum``, and return the integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def real(name: str, value: Any, *, above: float = -math.inf, minimum: float = -math.inf) -> float:
    """Check that ``value`` is finite, above ``above`` and at least ``minimum``, and return the number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value <= above or value < minimum:
        bound = f" and above {above:g}" if above > -math.inf else " and not negative" if minimum == 0 else ""
        raise ValueError(f"{name} must be finite{bound}, got {value}")
    return float(value)


def as_list(name: str, value: Any, items: str) -> list[Any]:
    """Convert a list, tuple or array to a list. ``items`` describes the expected entries in error messages."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {items}, got {type(value).__name__} {value!r:.60}")
    return list(value)


def of_type(name: str, value: Any, kind: Any) -> None:
    """Raise TypeError if ``value`` is not an instance of ``kind``."""
    if not isinstance(value, kind):
        expected = getattr(kind, "__name__", kind)
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__} {value!r:.60}")


def sampling(value: Any) -> SamplingParams:
    """Check that ``value`` is a :class:`SamplingParams` object, and return the object."""
    of_type("sampling_params", value, SamplingParams)
    return value  # type: ignore[no-any-return]


def function(name: str, value: Any) -> None:
    """Raise TypeError if ``value`` is not callable."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


def texts(values: Any) -> list[Any]:
    """Check that each prompt is a string or a list of chat messages, and return the prompts."""
    checked = as_list("prompts", values, "strings or message lists (write a single prompt as [prompt])")
    for index, prompt in enumerate(checked):
        of_type(f"prompts[{index}]", prompt, str | list)
    return checked


def dataset(rows: Any) -> Sequence[Any]:
    """Check that a dataset supports ``len()`` and indexing, and return the dataset."""
    if isinstance(rows, str | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise TypeError(
            f"dataset must support len() and dataset[i], got {type(rows).__name__} {rows!r:.60}; to read a file, use "
            "areno.api.datasets.load_rows"
        )
    return rows  # type: ignore[no-any-return]


def batch_sizes(mini_bs: Any, accumulation: Any) -> tuple[int, int | None]:
    """Check ``mini_bs`` and ``gradient_accumulation_steps``, and return both numbers."""
    return integer("mini_bs", mini_bs), (
        None if accumulation is None else integer("gradient_accumulation_steps", accumulation)
    )


def temperatures(values: Any) -> float | list[float]:
    """Check and return one temperature for all rows, or a list with the temperature of each row."""
    if isinstance(values, Real):
        return real("temperatures", values, above=0)
    return [real("temperatures", value, above=0) for value in as_list("temperatures", values, "numbers, or a number")]


def token_ids(name: str, prompt: Any) -> list[int]:
    """Return the token ids of a prompt as a list.

    The prompt is a list, an array, or an object with ``input_ids`` or ``ids``.
    """
    for attribute in ("input_ids", "ids"):
        if hasattr(prompt, attribute):
            prompt = getattr(prompt, attribute)
            break
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    ids = as_list(name, prompt, "token ids")
    if set(map(type, ids)) == {int}:
        return ids
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise TypeError(f"{name} must be a list of token ids, got {ids!r:.60}")
    return [int(token) for token in ids]


def prompts(values: Any, params: SamplingParams, *, context: int | None, vocabulary: int | None) -> list[list[int]]:
    """Check the prompts, and return the token ids of each prompt.

    ``context`` is the model's maximum number of tokens, and ``vocabulary`` is the size of its vocabulary.

    Raises UsageError if a prompt is empty, is too long, or has an id outside the vocabulary.
    """
    checked = [
        token_ids(f"prompt {i}", value) for i, value in enumerate(as_list("prompt_tokens", values, "token id lists"))
    ]
    longest, limit = params.max_prompt_len, tightest(params.max_context_len, context)
    for index, prompt in enumerate(checked):
        if not prompt:
            raise UsageError(f"prompt {index} is empty; a prompt needs at least one token")
        if longest is not None and len(prompt) > longest:
            raise UsageError(
                f"prompt {index} has {len(prompt)} tokens, more than max_prompt_len={longest}; skip this prompt, or raise "
                "max_prompt_len"
            )
        if limit is not None and len(prompt) >= limit:
            raise UsageError(
                f"prompt {index} has {len(prompt)} tokens, which leave no room for an answer in a context of {limit} tokens "
                "(limit of the model or of max_context_len); skip long prompts, as load_prompt_batches(max_prompt_tokens=...) "
                "does"
            )
        if vocabulary is not None and (wrong := unknown_id(prompt, vocabulary)) is not None:
            raise UsageError(
                f"prompt {index} has token id {wrong}, but the model's token ids are 0 to {vocabulary - 1}; encode prompts "
                "with trainer.get_tokenizer()"
            )
    return checked


def seed_table(values: Any, prompts: int, samples: int) -> list[list[int]]:
    """Check that ``values`` has one list of ``samples`` seeds per prompt, and return the lists."""
    rows = [
        [int(seed) for seed in as_list("seeds", row, "seeds")] for row in as_list("seeds", values, "lists of seeds")
    ]
    if len(rows) != prompts or any(len(row) != samples for row in rows):
        lengths = sorted({len(row) for row in rows})
        raise ValueError(
            f"`seeds` must contain one list per prompt ({prompts} prompts), and each list must contain {samples} seeds; got "
            f"{len(rows)} lists with lengths {lengths}"
        )
    return rows


def train_rows(values: Any) -> list[TrainSequence]:
    """Check that ``values`` is a list of :class:`TrainSequence` rows, and return the rows."""
    rows = as_list("batch_data", values, "TrainSequence rows")
    for index, row in enumerate(rows):
        of_type(f"batch_data[{index}]", row, TrainSequence)
    return rows


def refuse_unknown_temperatures(rows: Sequence[TrainSequence], sampled_at: Set[float]) -> None:
    """Raise UsageError if the default temperature of 1 may be wrong for rows that lack their sampling temperature.

    A row needs a temperature if it has log-probs. The default may be wrong if the trainer has sampled at a temperature other
    than 1. ``sampled_at`` contains all temperatures at which the trainer has sampled.
    """
    unknown = [index for index, row in enumerate(rows) if row.logprobs and not row.knows_temperature]
    if unknown and sampled_at - {1.0}:
        sampled = ", ".join(f"{temperature:g}" for temperature in sorted(sampled_at))
        raise UsageError(
            f"row {unknown[0]} has logprobs, but does not state the temperature at which its tokens were sampled; the "
            f"default of 1 may be wrong, because this trainer has sampled at temperature {sampled}; pass "
            "`temperature=sequence.temperature` to TrainSequence"
        )


def token_rows(values: Any) -> Sequence[list[int]]:
    """Check that each row is a list of token ids, and return the rows."""
    return [token_ids(f"token_rows[{index}]", row) for index, row in enumerate(as_list("token_rows", values, "rows"))]
