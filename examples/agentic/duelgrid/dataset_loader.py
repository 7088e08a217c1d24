"""Loader that turns duels into prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duel_environment import DuelGrid

from areno.api.agentic.environment import environment_rows


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Return one row for each duel."""
    return environment_rows(DuelGrid, default_loader(dataset_path), "state")
