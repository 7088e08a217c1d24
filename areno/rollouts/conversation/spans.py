"""Determines the role of each token of a turn, and which tokens are trained on.

Sampled tokens belong to text (including reasoning) or to a tool call. Prompt tokens belong to the message whose text they
encode. In prompts, the chat template's markup belongs to no message and is not trained on.
"""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.history import text_of
from areno.text.reasoning import ReasoningDelta
from areno.text.tool_calls import ToolCallDelta


@dataclass(frozen=True, slots=True)
class LossMaskPolicy:
    """Selects the tokens of a trajectory that count in the policy loss.

    A sampled token counts at most once, even if the token is in several rows. Tokens that were not sampled (tool results and
    prompts) have no rollout log-probs. If these tokens are trained on, areno computes their log-probs first.
    """

    assistant_text: bool = True  # text of the model, including reasoning, except in the last answer
    assistant_tool_calls: bool = True  # tool calls of the model, including those in the last answer
    tool_results: bool = False  # contents of tool results
    final_assistant_text: bool = True  # text of the last answer of each conversation
    system_prompt: bool = False  # contents of system messages
    user_prompt: bool = False  # contents of user messages
    forced_tokens: bool = False  # tokens without an alternative under a grammar (forced call, structured output)


Role = Literal["system", "user", "assistant", "tool", "template", "text", "call"]
"""Sampled tokens have the role ``text`` or ``call``, and prompt tokens have the other roles.

``assistant`` marks the prompt tokens of an assistant message, such as an earlier answer. ``template`` marks prompt tokens
that must not be trained on: tokens outside of message contents, and messages that an earlier training row contains.
"""

_RENAMED: dict[str, Role] = {"developer": "system", "function": "tool"}


def sampled_mask(turn: Turn, policy: LossMaskPolicy, final: bool) -> list[bool]:
    """Return a mask of a turn's sampled tokens: True for the tokens that count in the loss.

    ``final`` is True for the last turn of a conversation.
    """
    text = policy.final_assistant_text if final else policy.assistant_text
    if text == policy.assistant_tool_calls:
        mask = [text] * len(turn.tokens)
    else:
        mask = [policy.assistant_tool_calls if role == "call" else text for role in sampled_roles(turn)]
    if policy.forced_tokens or not turn.forced:
        return mask
    return [counts and not forced for counts, forced in zip(mask, turn.forced, strict=True)]


def sampled_roles(turn: Turn) -> list[Role]:
    """Return the role of each sampled token, ``text`` or ``call``. A stop token has the role of the previous token."""
    if not any(isinstance(piece, ToolCallDelta) for piece in turn.pieces):
        return ["text"] * len(turn.tokens)
    spans = _call_spans(turn)
    roles: list[Role] = []
    for place, offset in enumerate(turn.offsets):
        end = turn.offsets[place + 1] if place + 1 < len(turn.offsets) else len(turn.text)
        if end == offset and roles:
            roles.append(roles[-1])  # no visible text: an end token, or part of a character
        else:
            roles.append("call" if any(begin <= offset < stop for begin, stop in spans) else "text")
    return roles


def _call_spans(turn: Turn) -> list[tuple[int, int]]:
    """Return the spans of tool calls in a turn's text, including the markers.

    ``turn.pieces`` has the texts before, between and after the tool calls. This function finds these texts in ``turn.text``.
    The tool calls lie between them.
    """
    pieces = turn.pieces
    calls = [place for place, piece in enumerate(pieces) if isinstance(piece, ToolCallDelta)]
    spans: list[tuple[int, int]] = []
    # Search backwards for the text after the last call, because arguments may contain the same text.
    stop = len(turn.text)
    for piece in reversed(pieces[calls[-1] + 1 :]):
        start = -1 if isinstance(piece, ToolCallDelta) else turn.text.rfind(piece.text, 0, stop)
        stop = start if start >= 0 else stop
    cursor, pending = 0, False
    for place, piece in enumerate(pieces[: calls[-1]]):
        if isinstance(piece, ToolCallDelta):
            pending = True
            continue
        start = turn.text.find(piece.text, cursor, stop)
        if start < 0:
            continue
        if pending:
            spans.append((cursor, start))
        cursor, pending = start + len(piece.text), False
        if isinstance(piece, ReasoningDelta) and turn.closer and not isinstance(pieces[place + 1], ReasoningDelta):
            closed = turn.text.find(turn.closer, cursor, stop)
            cursor = closed + len(turn.closer) if closed >= 0 else cursor
    return [*spans, (cursor, stop)]


def context_mask(turn: Turn, policy: LossMaskPolicy, tokenizer: Any, seen: Container[int] = ()) -> list[bool]:
    """Return a mask of a turn's new prompt tokens: True for the tokens that count in the loss.

    The mask is False for messages that an earlier training row contains. ``seen`` identifies these messages; see
    :func:`context_roles`.

    Raises the UsageError of :func:`context_roles`.
    """
    trained = {"system": policy.system_prompt, "user": policy.user_prompt, "tool": policy.tool_results}
    if not any(trained.values()):
        return [False] * len(turn.context_tokens)
    return [trained.get(role, False) for role in context_roles(turn, tokenizer, seen)]


def context_roles(turn: Turn, tokenizer: Any, seen: Container[int] = ()) -> list[Role]:
    """Return the role of each token in ``turn.context_tokens``.

    ``seen`` contains the ``Turn.keys`` of the messages in earlier training rows. If the key of a message is in ``seen``, its
    tokens have the role ``template``, so that they are not trained on again.

    Raises UsageError if the tokenizer cannot map tokens to text.
    """
    if not turn.context_tokens:
        return []
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} cannot map tokens to text, so prompt and tool result tokens cannot be "
            "distinguished; omit --train-tool-results"
        )
    encoded = tokenizer(turn.anchor + turn.context_text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"][-len(turn.context_tokens) :]
    # A BOS token that the template did not write has no text.
    offsets = [(0, 0)] * (len(turn.context_tokens) - len(offsets)) + offsets
    known = 0 if turn.parent is None else len(turn.parent.messages) + 1
    repeated = sum(key in seen for key in turn.keys[known:])
    spans = _content_spans(turn.context_text, turn.messages[known:], repeated)
    begin = len(turn.anchor)
    return [_role_at(start - begin, stop - begin, spans) for start, stop in offsets]


def _role_at(start: int, stop: int, spans: Sequence[tuple[int, int, Role]]) -> Role:
    for begin, end, role in spans:
        if begin <= start and stop <= end and start < stop:
            return role
    return "template"


def _content_spans(text: str, messages: Sequence[dict[str, Any]], repeated: int) -> list[tuple[int, int, Role]]:
    """Return the spans and roles of message contents in ``text``.

    The first ``repeated`` messages are also in an earlier training row. They get the role ``template``, so that they are not
    trained on again.
    """
    spans: list[tuple[int, int, Role]] = []
    cursor = 0
    for place, message in enumerate(messages):
        role: Role = "template" if place < repeated else _RENAMED.get(message["role"], message["role"])
        content = text_of(message.get("content")).strip()
        # Some templates write tool results as quoted JSON.
        for shown in (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]):
            start = text.find(shown, cursor) if shown else -1
            if start >= 0:
                spans.append((start, start + len(shown), role))
                cursor = start + len(shown)
                break
    return spans
