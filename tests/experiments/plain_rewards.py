"""Reward functions for worker processes, and a filter; importing this module imports nothing heavy."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def letters(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Differs between answers, and is equal for equal answers."""
    return sum(completion_ids) % 7 / 7


def in_parts(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> Any:
    """The reward of ``letters``, and the negative length of the answer."""
    return {"letters": letters(prompt, completions, prompt_ids, completion_ids), "short": -len(completion_ids)}


def nothing(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Always 0."""
    return 0.0


def broken(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Reads a column that no row has."""
    return float(data["no such column"])


def by_row(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """1 for a row whose answer is a multiple of 4, else 0."""
    return float(int(data["answer"]) % 4 == 0)


def solved(trajectory: dict[str, Any]) -> bool:
    """A filter: groups whose reward is 1."""
    return bool(trajectory["rewards"].mean() == 1)


def late(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Records the call as a file, and does not return in time."""
    folder = Path(data["folder"])
    (folder / f"{time.time_ns()}-{os.getpid()}").touch()
    time.sleep(1000)
    return 1.0


def slow(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Returns the id of its process."""
    time.sleep(0.05)
    return float(os.getpid())


def specials(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Number of special tokens in the text."""
    return float(completions.count("<|"))
