"""Rewards and a loader for the runs of ``test_driven``; importing this module imports nothing heavy."""

from __future__ import annotations

from typing import Any


def reward_fn(record: Any) -> float:
    """A reward that differs between answers."""
    return sum(record.tokens) % 7 / 7


def parts(record: Any) -> dict[str, float]:
    return {"digits": reward_fn(record), "length": len(record.tokens)}


def failing(record: Any) -> float:
    if record.metadata["sample_index"] == 1:
        raise ValueError("no reward for this one")
    return reward_fn(record)


def equal(record: Any) -> float:
    return 1.0


def letters(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    return sum(completion_ids) % 7 / 7


def named(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> dict[str, float]:
    return {"digits": sum(completion_ids) % 7 / 7, "length": len(completion_ids)}


def stumbling(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    if "1 plus 1?" in prompt:
        raise ValueError("no reward for this one")
    return letters(prompt, completions, prompt_ids, completion_ids)


def same(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    return 1.0


def load_training_dataset(path: str, *, default_loader: Any, **_: Any) -> Any:
    return default_loader(path)
