"""Counts the examples and distinct prompts of a run for ``environment.json``.

The counts show how often training repeats a prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areno.text.data_rows import PROMPT_FIELDS

_MOST_ROWS = 100_000


def data_size(rows: Sequence[Any], held_out: Sequence[Any] | None, steps_per_epoch: int) -> dict[str, int]:
    """Count the rows and the distinct prompts of the data sets, including rows that the run skips because they are too long.

    Returns:
        ``examples``, ``prompts`` (number of distinct prompts), ``steps_per_epoch``, ``held_out_examples`` and
        ``held_out_prompts``. Unknown sizes are omitted.
    """
    sizes = {"examples": len(rows), "prompts": _distinct_prompts(rows), "steps_per_epoch": steps_per_epoch}
    if held_out is not None:
        sizes |= {"held_out_examples": len(held_out), "held_out_prompts": _distinct_prompts(held_out)}
    return {name: size for name, size in sizes.items() if size is not None}


def _distinct_prompts(rows: Any) -> int | None:
    """Return the number of distinct prompts.

    None if a prompt is missing, if there are too many rows, or if the type of the rows is unknown.
    """
    if len(rows) > _MOST_ROWS:
        return None
    columns = getattr(rows, "column_names", None)
    if isinstance(columns, list):  # a Hugging Face dataset: only the prompt column is read
        names = [name for name in PROMPT_FIELDS if name in columns]
        prompts = list(rows[names[0]]) if names else [None]
    elif isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        prompts = [next((row[name] for name in PROMPT_FIELDS if row.get(name)), None) for row in rows]
    else:
        return None
    return None if None in prompts else len({json.dumps(_asked(prompt), default=str) for prompt in prompts})


def _asked(prompt: Any) -> Any:
    """Return the prompt. For an SFT conversation, return only the messages before the final answer."""
    ends = isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping)
    return prompt[:-1] if ends and prompt[-1].get("role") == "assistant" else prompt
