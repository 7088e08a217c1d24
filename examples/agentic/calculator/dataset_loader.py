"""Loader that turns problems into prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calculator import Calculator

from areno.api.agentic.environment import environment_rows


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Return one row for each problem."""
    return environment_rows(Calculator, default_loader(dataset_path), "steps")
