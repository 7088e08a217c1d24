"""Continues a conversation from its recorded tokens. Only the new text of a request is tokenized.

The chat template renders two texts: the conversation up to the model's last answer, and the conversation with the new messages.
If the first text is a prefix of the second text, the rest of the second text is tokenized. The new tokens are appended to the
recorded tokens.

If the first text is not a prefix, the template renders the history differently than before, usually without the reasoning. In
deployment, the model would read this new history instead of the recorded tokens. The request therefore starts a new training
row (:class:`Forked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areno.serving.recording import Piece, Render
from areno.types import FinishReason
from areno.types.routing import RoutingRecord

ForkReason = Literal["rewritten", "thinking dropped", "ended otherwise", "edited"]
"""Why a request cannot continue from recorded tokens.

- ``rewritten``: the template renders earlier turns differently.
- ``thinking dropped``: the template omits the reasoning of earlier turns.
- ``ended otherwise``: the recorded answer has an end that the chat template does not render, such as a stop string.
- ``edited``: the client edited the history.
"""

_MARK = "\u241fareno\u241f"
_LETTER = "a"


class Forked(Exception):  # noqa: N818  (an expected outcome, not an error)
    """Raised with a ``reason`` if a request cannot be appended to the recorded tokens of its conversation."""

    def __init__(self, reason: ForkReason) -> None:
        super().__init__(reason)
        self.reason: ForkReason = reason


@dataclass(slots=True, eq=False)
class Turn:
    """One request with one of its answers."""

    id: str  # id of the turn in responses
    parent: Turn | None  # turn that this one continues; None for the start of a conversation
    context_tokens: list[int]  # prompt tokens after the parent's answer; without a parent, the complete prompt
    context_text: str  # text of `context_tokens`
    anchor: str  # text that preceded `context_text` when it was tokenized; empty for a complete prompt
    prompt_text: str  # the complete rendered prompt
    messages: list[dict[str, Any]]  # messages of the request
    tools: list[dict[str, Any]]
    answer: dict[str, Any] = field(default_factory=dict)  # the assistant's message
    tokens: list[int] = field(default_factory=list)  # sampled tokens
    logprobs: list[float] = field(default_factory=list)  # log-probs of `tokens` under the temperature-scaled policy
    versions: list[int] = field(default_factory=list)  # weight version that sampled each token
    forced: list[bool] = field(
        default_factory=list
    )  # whether the grammar left no alternative; empty if no token was forced
    routed_experts: RoutingRecord | None = None  # for all prompt and sampled tokens except the last
    cut_mass: float = 0.0  # probability mass removed by top-k, top-p, min-p and a grammar, mean over sampled tokens
    finish: FinishReason = "stop"  # `length` without tokens if the prompt filled the context
    by_token: bool = True  # whether the answer ended at a stop token
    temperature: float = 1.0
    text: str = ""  # visible text of the sampled tokens
    offsets: Sequence[int] = ()  # start of each token in `text`
    pieces: Sequence[Piece] = ()  # the parsed text
    closer: str = ""  # marker that ends the reasoning
    fork: ForkReason | None = None  # why the turn starts a new row although it continues a conversation
    keys: Sequence[int] = ()  # see `prefix_keys`; empty without a recorder
    extended: bool = False  # whether another turn continues this one
    response_id: str = ""  # id of the response that the client received, without its type prefix
    reward: float | None = None

    @property
    def path(self) -> list[Turn]:
        """All turns from the first turn of the conversation to this turn."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def prompt(self) -> list[int]:
        """The prompt tokens of the request."""
        before = self.parent.path if self.parent is not None else []
        return [token for turn in before for token in (*turn.context_tokens, *turn.tokens)] + self.context_tokens

    @property
    def length(self) -> int:
        """Total number of tokens of the prompt and the answer."""
        return sum(len(turn.context_tokens) + len(turn.tokens) for turn in self.path)


def continue_turn(tokenizer: Any, past: Turn, new: Sequence[dict[str, Any]], render: Render) -> Turn:
    """Return a turn that continues an answered turn with zero or more messages. The new turn has no answer yet.

    Raises:
        Forked: the recorded tokens cannot be continued, for example because the template rewrites the history.
        UsageError: the template rejects the messages.
    """
    history = [dict(message) for message in (*past.messages, past.answer)]
    before = render(history, False).text
    after = render([*history, *map(dict, new)], True).text
    if not (after.startswith(past.prompt_text) and after.startswith(before)):
        thoughts = [str(message.get("reasoning_content") or "").strip() for message in history]
        raise Forked("thinking dropped" if any(t and t not in after for t in thoughts) else "rewritten")
    answer = before[len(past.prompt_text) :]
    if not _shows(answer, past.answer.get("reasoning_content")):
        raise Forked("thinking dropped")
    if not _shows(answer, past.answer.get("content")):
        raise Forked("rewritten")
    text, anchor = _after_answer(tokenizer, past, history, render, before, after)
    messages = [*past.messages, past.answer, *new]
    return Turn("", past, tokens_after(tokenizer, anchor, text), text, anchor, after, messages, past.tools)


def tokens_after(tokenizer: Any, anchor: str, text: str) -> list[int]:
    """Return the tokens of ``text`` in ``anchor + text``. Some tokenizers encode text differently at the start of a string."""
    if not text:
        return []
    head, both = tokenizer([anchor, anchor + text], add_special_tokens=False)["input_ids"]
    if both[: len(head)] == head:
        return list(both[len(head) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _shows(rendered: str, text: Any) -> bool:
    return not isinstance(text, str) or text.strip() in rendered


def _after_answer(
    tokenizer: Any, past: Turn, history: list[dict[str, Any]], render: Render, before: str, after: str
) -> tuple[str, str]:
    """Return the text that follows the sampled tokens of ``past``, and the ``anchor`` with which :func:`tokens_after` must
    tokenize this text.

    ``before`` is the rendered ``history``, which ends with the answer of ``past``. ``after`` also has the new messages.
    """
    if past.by_token and past.tokens:
        return _after_stop_token(tokenizer.decode(past.tokens[-1:], skip_special_tokens=False), past, before, after)
    if past.finish != "length":  # a stop string is in the tokens, but not in the text
        raise Forked("ended otherwise")
    marked = render([*history[:-1], {"role": "assistant", "content": _MARK}], False).text
    _, mark, end = marked.rpartition(_MARK)
    if not mark or not before.endswith(end):
        raise Forked("rewritten")
    return end + after[len(before) :], _LETTER


def _after_stop_token(end: str, past: Turn, before: str, after: str) -> tuple[str, str]:
    """Return the result of :func:`_after_answer` for an answer that ended at the stop token ``end``.

    Usually, the rendered answer ends with ``end``. In some formats, ``end`` is instead the first token of the next turn. Raises
    :class:`Forked` if neither is the case.
    """
    rest = after[len(before) :]
    answer = before[len(past.prompt_text) :]
    place = answer.rfind(end)
    if end and place >= 0 and not answer[place + len(end) :].strip():
        return answer[place + len(end) :] + rest, end
    if end and rest.lstrip().startswith(end):
        return rest.lstrip()[len(end) :], end
    raise Forked("ended otherwise")
