"""Which role each token of a turn has, and which of them count in the loss.

Sampled tokens are text, reasoning included, or part of a tool call. Tokens that were given belong to the message whose
content they render; what the template writes around contents belongs to no message, and is never trained on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.history import text_of
from areno.text.reasoning import ReasoningDelta
from areno.text.tool_calls import ToolCallDelta


@dataclass(frozen=True, slots=True)
class LossMaskPolicy:
    """Which spans of a trajectory count in the policy loss.

    Each sampled token counts once, however many rows it stands in. Tokens that were not sampled (tool results, prompts)
    have no rollout log-prob; the policy's own at the time of the rollout stands in.
    """

    assistant_text: bool = True  # text that the model wrote, reasoning included, but for the last answer
    assistant_tool_calls: bool = True  # tool calls that it made, in the last answer as well
    tool_results: bool = False  # contents of what tools returned to it
    final_assistant_text: bool = True  # text of the last answer of each conversation
    system_prompt: bool = False  # contents of system messages
    user_prompt: bool = False  # contents of user messages
    forced_tokens: bool = False  # tokens that a grammar (forced call, structured output) left no choice about


Role = Literal["system", "user", "assistant", "tool", "template", "text", "call"]
"""``text`` and ``call`` are sampled, all others were given; ``assistant`` is an answer in a prompt that begins anew."""

_RENAMED: dict[str, Role] = {"developer": "system", "function": "tool"}


def sampled_mask(turn: Turn, policy: LossMaskPolicy, final: bool) -> list[bool]:
    """Which of a turn's sampled tokens are trained on; ``final`` says that the turn is the last of its conversation."""
    text = policy.final_assistant_text if final else policy.assistant_text
    if text == policy.assistant_tool_calls:
        mask = [text] * len(turn.tokens)
    else:
        mask = [policy.assistant_tool_calls if role == "call" else text for role in sampled_roles(turn)]
    if policy.forced_tokens or not turn.forced:
        return mask
    return [counts and not forced for counts, forced in zip(mask, turn.forced, strict=True)]


def sampled_roles(turn: Turn) -> list[Role]:
    """``text`` or ``call`` for each sampled token; the end of a turn belongs to what it ends."""
    if not any(isinstance(piece, ToolCallDelta) for piece in turn.pieces):
        return ["text"] * len(turn.tokens)
    spans = _call_spans(turn)
    roles: list[Role] = []
    for place, offset in enumerate(turn.offsets):
        end = turn.offsets[place + 1] if place + 1 < len(turn.offsets) else len(turn.text)
        if end == offset and roles:
            roles.append(roles[-1])  # shows no text: an end token, or half a character
        else:
            roles.append("call" if any(begin <= offset < stop for begin, stop in spans) else "text")
    return roles


def _call_spans(turn: Turn) -> list[tuple[int, int]]:
    """Where in a turn's text its calls stand, with the markers around them: what lies between pieces of text."""
    pieces = turn.pieces
    calls = [place for place, piece in enumerate(pieces) if isinstance(piece, ToolCallDelta)]
    spans: list[tuple[int, int]] = []
    # Text behind the last call is looked for from the end: arguments may hold the same words.
    stop = len(turn.text)
    for piece in reversed(pieces[calls[-1] + 1 :]):
        found = -1 if isinstance(piece, ToolCallDelta) else turn.text.rfind(piece.text, 0, stop)
        stop = found if found >= 0 else stop
    cursor, pending = 0, False
    for place, piece in enumerate(pieces[: calls[-1]]):
        if isinstance(piece, ToolCallDelta):
            pending = True
            continue
        found = turn.text.find(piece.text, cursor, stop)
        if found < 0:
            continue
        if pending:
            spans.append((cursor, found))
        cursor, pending = found + len(piece.text), False
        if isinstance(piece, ReasoningDelta) and turn.closer and not isinstance(pieces[place + 1], ReasoningDelta):
            closed = turn.text.find(turn.closer, cursor, stop)
            cursor = closed + len(turn.closer) if closed >= 0 else cursor
    return [*spans, (cursor, stop)]


def given_mask(turn: Turn, policy: LossMaskPolicy, tokenizer: Any) -> list[bool]:
    """Which of the tokens that a turn was given are trained on; UsageError as for :func:`given_roles`."""
    trained = {"system": policy.system_prompt, "user": policy.user_prompt, "tool": policy.tool_results}
    if not any(trained.values()):
        return [False] * len(turn.given)
    return [trained.get(role, False) for role in given_roles(turn, tokenizer)]


def given_roles(turn: Turn, tokenizer: Any) -> list[Role]:
    """The role of each token that a turn was given; UsageError where the tokenizer does not say what text they show."""
    if not turn.given:
        return []
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not say which text its tokens stand for, so the tokens of prompts and tool "
            "results cannot be told apart; leave --train-tool-results out"
        )
    encoded = tokenizer(turn.anchor + turn.given_text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"][-len(turn.given) :]
    # A BOS that the template has not written has no text.
    offsets = [(0, 0)] * (len(turn.given) - len(offsets)) + offsets
    known = 0 if turn.parent is None else len(turn.parent.messages) + 1
    spans = _content_spans(turn.given_text, turn.messages[known:])
    begin = len(turn.anchor)
    return [_role_at(start - begin, stop - begin, spans) for start, stop in offsets]


def _role_at(start: int, stop: int, spans: Sequence[tuple[int, int, Role]]) -> Role:
    """The role of the content that a token lies in; one that is partly markup counts as markup."""
    for begin, end, role in spans:
        if begin <= start and stop <= end and start < stop:
            return role
    return "template"


def _content_spans(text: str, messages: Sequence[dict[str, Any]]) -> list[tuple[int, int, Role]]:
    spans: list[tuple[int, int, Role]] = []
    cursor = 0
    for message in messages:
        content = text_of(message.get("content")).strip()
        # Some templates quote what tools return.
        for shown in (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]):
            found = text.find(shown, cursor) if shown else -1
            if found >= 0:
                spans.append((found, found + len(shown), _RENAMED.get(message["role"], message["role"])))
                cursor = found + len(shown)
                break
    return spans
