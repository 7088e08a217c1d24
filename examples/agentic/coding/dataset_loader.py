"""Loader that turns repair tasks into prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coding import Repair

from areno.api.agentic.environment import environment_rows


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Return one row for each task."""
    return environment_rows(Repair, default_loader(dataset_path), "problem_statement")
