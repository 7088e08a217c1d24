"""Loaders that turn boards into prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tictactoe import TicTacToe, TicTacToeInText

from areno.api.agentic.environment import environment_rows


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Return rows for the agent with the tool."""
    return environment_rows(TicTacToe, default_loader(dataset_path), "board")


def load_text_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Return rows for the agent without tools."""
    return environment_rows(TicTacToeInText, default_loader(dataset_path), "board")
