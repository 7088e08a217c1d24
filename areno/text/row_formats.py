"""Rows of common data sets in the keys that areno trains on: ``prompt`` and ``response``, or ``chosen`` and ``rejected``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LAST = "\n\nAssistant:"


def sft_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row for supervised training; one that has its keys already, or is of no known kind, stays as it is.

    Of ``messages`` the last one, of the assistant, is the response, and those before it are the prompt. ``question`` and
    ``answer`` are prompt and response.
    """
    if "prompt" in row or "response" in row:
        return row
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1:
        *prompt, last = messages
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            return {**row, "prompt": prompt, "response": last.get("content")}
    if row.get("question") is not None and "answer" in row:
        return {**row, "prompt": row["question"], "response": row["answer"]}
    return row


def pair_row(row: Mapping[str, Any], *, with_template: bool) -> Mapping[str, Any]:
    """A row of a preference pair; transcripts of hh-rlhf become conversations, every other row stays as it is.

    A transcript begins with ``\\n\\nHuman:`` and has turns of ``Human`` and ``Assistant``. One without an answer at its end
    becomes an empty list, which leaves the pair out.

    A row with a ``prompt`` has no transcripts. Without a chat template (``with_template``) the pair stays text, the prompt
    being the part that the two share, up to an ``Assistant:``.
    """
    texts = [row.get(key) for key in ("chosen", "rejected")]
    if row.get("prompt") is not None or not all(isinstance(text, str) and _TURN.match(text) for text in texts):
        return row
    chosen, rejected = (str(text) for text in texts)
    talks = {"chosen": _messages(chosen), "rejected": _messages(rejected)}
    if with_template or not all(talks.values()):
        return {**row, **talks}
    differs = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    cut = chosen.rfind(_LAST, 0, differs)
    if cut < 0:
        return {**row, "chosen": [], "rejected": []}  # not two answers to one prompt
    cut += len(_LAST)
    return {**row, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _messages(transcript: str) -> list[dict[str, str]]:
    """Turns of a transcript; neighbours of the same role are one."""
    _, *parts = _TURN.split(transcript)
    messages: list[dict[str, str]] = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if messages and messages[-1]["role"] == _ROLES[name]:
            messages[-1]["content"] += "\n\n" + text.strip()
        else:
            messages.append({"role": _ROLES[name], "content": text.strip()})
    return messages if messages[-1]["role"] == "assistant" and messages[-1]["content"] else []
