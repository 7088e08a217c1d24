"""Preference data sets as rows of ``prompt``, ``chosen`` and ``rejected``.

Accepts rows in which ``chosen`` and ``rejected`` are conversations, or which also have a ``prompt``. The loader also
converts the transcripts of HH-RLHF, which are texts of ``Human:`` and ``Assistant:`` turns, to conversations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Load ``dataset_path`` and convert its rows.

    Raises:
        KeyError: a row has no ``chosen`` or ``rejected``; the message lists its keys.
        ValueError: a row has two texts that are not transcripts, and no prompt.
    """
    return [normalize(row) for row in default_loader(dataset_path)]


def normalize(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in areno's format, with all other keys unchanged."""
    if "chosen" not in row or "rejected" not in row:
        raise KeyError(f"a row needs `chosen` and `rejected`; this row has {', '.join(sorted(row))}")
    if row.get("prompt") is not None or not isinstance(row["chosen"], str):
        return dict(row)
    return {**row, "chosen": conversation(row["chosen"]), "rejected": conversation(row["rejected"])}


def conversation(transcript: str) -> list[dict[str, str]]:
    """Return the turns of a text such as ``\\n\\nHuman: Hello.\\n\\nAssistant: Good morning.``"""
    before, *turns = _TURN.split(f"\n\n{transcript.strip()}")
    if before.strip() or not turns:
        raise ValueError(
            f"a row without `prompt` must contain transcripts that begin with `Human:`, got {transcript!r:.80}"
        )
    return [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(turns[::2], turns[1::2], strict=True)
    ]
