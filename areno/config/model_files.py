"""What the files of a model folder say without loading it; of a repo id, which would have to be fetched, nothing is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areno.config.paths import base_of
from areno.errors import UsageError

HEADS = ("num_attention_heads", "num_key_value_heads")
"""What ranks that share a copy of a model divide."""


def model_config(place: str) -> Mapping[str, Any]:
    """The ``config.json`` of a model, of an adapter's base model, its language model's part included; {} if it is not here."""
    folder = local_folder(place, base_of)
    config = {} if folder is None else read_settings(folder / "config.json")
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def heads_problem(config: Mapping[str, Any], tp_size: int, place: str, option: str = "--tp-size") -> str:
    """Why ``tp_size`` ranks cannot share the attention heads (`HEADS`) of a model; empty if they can."""
    for name in HEADS:
        heads = config.get(name)
        if isinstance(heads, int) and heads % tp_size:
            fitting = [str(size) for size in range(1, heads + 1) if heads % size == 0]
            return (
                f"{option} {tp_size}: {place} has {name} {heads}, which {tp_size} ranks cannot share; use "
                f"{' or '.join(fitting)}"
            )
    return ""


def local_folder(place: str, resolve: Callable[[str], str]) -> Path | None:
    """The folder that a model's name resolves to (:func:`~areno.config.paths.base_of` or ``tokenizer_of``), if it is here."""
    try:
        folder = Path(resolve(place)).expanduser()
    except UsageError:  # `ckpt_problem` says so
        return None
    return folder if folder.is_dir() else None


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object; {} where it is absent or cannot be read, which whoever needs the file will say."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
