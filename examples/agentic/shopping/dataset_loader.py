"""Loader that turns shopping tasks into prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shopping import Shopping

from areno.api.agentic.environment import environment_rows


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Return one row for each task."""
    return environment_rows(Shopping, default_loader(dataset_path), "task")
