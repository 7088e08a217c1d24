"""Loader that turns instruction rows (``instruction``, optional ``input``, ``output``) into prompt and response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Load ``dataset_path`` and convert its rows.

    Raises:
        KeyError: a row has no ``instruction`` or ``output``; the message lists its keys.
    """
    return [normalize(row) for row in default_loader(dataset_path)]


def normalize(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with ``prompt`` and ``response``. A row that already has both keys is returned unchanged."""
    if row.get("prompt") is not None and "response" in row:
        return dict(row)
    if "instruction" not in row or "output" not in row:
        raise KeyError(f"a row needs `instruction` and `output`; this row has {', '.join(sorted(row))}")
    prompt = f"Instruction: {row['instruction']}\n"
    if row.get("input"):
        prompt += f"Input: {row['input']}\n"
    return {**row, "prompt": f"{prompt}Response:", "response": row["output"]}
