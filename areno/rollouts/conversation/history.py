"""Compares message lists, but ignores changes that clients make when they reformat messages.

Clients may split content into parts, reserialize the arguments of tool calls, drop reasoning, or add empty fields. These
changes do not count as edits.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# Fields of an assistant message that clients add, or that are compared separately.
_FORM = frozenset(
    {"role", "content", "tool_calls", "reasoning_content", "refusal", "annotations", "audio", "function_call"}
)


def prefix_keys(messages: Sequence[Message]) -> list[int]:
    """Return one hash key per prefix of a conversation. Except for hash collisions, equal keys mean equal messages."""
    return list(itertools.accumulate(messages, next_key, initial=0))[1:]


def next_key(before: int, message: Message) -> int:
    """Return the hash key of a conversation that ends with ``message``. ``before`` is the key of the earlier messages."""
    return hash((before, _canonical(message)))


def same_answer(original: Message, returned: Message) -> bool:
    """Whether a client returned an assistant message unchanged. ``returned`` may lack tool call ids and reasoning."""
    if _canonical(original) != _canonical(returned):
        return False
    reasoning = returned.get("reasoning_content")
    if reasoning and str(reasoning).strip() != str(original.get("reasoning_content") or "").strip():
        return False
    pairs = zip(original.get("tool_calls") or [], returned.get("tool_calls") or [], strict=True)
    return all(not theirs.get("id") or theirs["id"] == mine.get("id") for mine, theirs in pairs)


def call_ids(message: Message) -> list[str]:
    """Return the ids of a message's tool calls. Tool calls without an id are omitted."""
    return [call["id"] for call in message.get("tool_calls") or [] if isinstance(call, Mapping) and call.get("id")]


def text_of(content: Any) -> str:
    """Join the parts of a message's content into one text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in parts)


def _canonical(message: Message) -> tuple[Any, ...]:
    role = "system" if message["role"] == "developer" else message["role"]
    text = text_of(message.get("content"))
    if role != "assistant":
        further = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        return role, text, _as_text(further)
    further = {k: v for k, v in message.items() if k not in _FORM and v}
    calls = tuple(_call(call) for call in message.get("tool_calls") or [])
    return role, text.strip(), calls, _as_text(further)


def _as_text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=str) if fields else ""


def _call(call: Any) -> tuple[str, str]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):  # the chat template refuses the call
        return "", _as_text({"call": call})
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(function.get("name")), arguments
    return str(function.get("name")), json.dumps(arguments, sort_keys=True, default=str)
