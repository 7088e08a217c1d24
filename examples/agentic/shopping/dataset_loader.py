"""Shopping tasks as prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shopping import Shopping

from areno.api.agentic.environment import environment_rows


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """One row for each."""
    return environment_rows(Shopping, default_loader(dataset_path), "task")
