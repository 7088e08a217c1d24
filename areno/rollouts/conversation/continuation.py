"""The tokens that a conversation goes on with: those that are known, and of the new request only what is new in it.

The template renders the conversation twice, as it was when the model had answered, and with what was added since. Where
the first text is the beginning of the second, the rest is tokenized and appended behind what the model said: nothing
that it said is ever tokenized again. Where it is not, the template tells the past differently now (most often without
the reasoning), and going on from the known tokens would train on what a deployed model never sees; :class:`Forked`
then says why the request must begin a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areno.serving.recording import Piece, Render
from areno.types import FinishReason
from areno.types.routing import RoutingRecord

ForkReason = Literal["rewritten", "thinking dropped", "ended otherwise", "edited"]
"""Why a request cannot go on from known tokens: the template rewrites earlier turns, or leaves their reasoning out; the
answer ended with something that the template does not write; or the client changed what had been said."""

_MARK = "\u241fareno\u241f"
_LETTER = "a"


class Forked(Exception):  # noqa: N818  (an answer that is looked for, not a failure)
    """A request cannot go on from known tokens; ``reason`` says why."""

    def __init__(self, reason: ForkReason) -> None:
        super().__init__(reason)
        self.reason: ForkReason = reason


@dataclass(slots=True, eq=False)
class Turn:
    """One request with one of its answers."""

    id: str  # names it in responses
    parent: Turn | None  # the turn that it goes on from; None where it begins anew
    given: list[
        int
    ]  # tokens before the answer: the whole prompt without a parent, else what follows the parent's answer
    given_text: str  # what these tokens were made of
    anchor: str  # text that `given_text` was tokenized behind; empty for a whole prompt
    prompt_text: str  # the rendered prompt as a whole
    messages: list[dict[str, Any]]  # of the request
    tools: list[dict[str, Any]]
    answer: dict[str, Any] = field(default_factory=dict)  # the assistant's message
    tokens: list[int] = field(default_factory=list)  # sampled
    logprobs: list[float] = field(default_factory=list)  # of `tokens` under the policy, scaled by `temperature`
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    forced: list[bool] = field(default_factory=list)  # a grammar left no other token; empty where it never did
    routed_experts: RoutingRecord | None = None  # of the prompt and `tokens` but the last
    cut_mass: float = 0.0  # mean probability per sampled token that top-k, top-p, min-p and a grammar removed
    finish: FinishReason = "stop"  # `length` without a token where the context was full before
    by_token: bool = True  # it ended at a stop token
    temperature: float = 1.0
    text: str = ""  # visible text of the sampled tokens
    offsets: Sequence[int] = ()  # where in it each token begins
    pieces: Sequence[Piece] = ()  # what it was read as
    closer: str = ""  # marker that ends the reasoning
    fork: ForkReason | None = None  # why it begins a row of its own though it continues a conversation
    keys: Sequence[int] = ()  # of the beginnings of its messages, see `prefix_keys`; empty without a tape
    extended: bool = False  # another turn goes on from it
    response_id: str = ""  # what the client knows it by, without a prefix
    reward: float | None = None

    @property
    def path(self) -> list[Turn]:
        """The turns from the first one to this."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def prompt(self) -> list[int]:
        """What the engine was given."""
        before = self.parent.path if self.parent is not None else []
        return [token for turn in before for token in (*turn.given, *turn.tokens)] + self.given

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return sum(len(turn.given) + len(turn.tokens) for turn in self.path)


def go_on(tokenizer: Any, past: Turn, new: Sequence[dict[str, Any]], render: Render) -> Turn:
    """Continue an answered turn with further messages, of which there may be none; the turn made has no answer yet.

    Raises Forked: the known tokens are not how the template tells the past now; UsageError: the template refuses the
    messages.
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
    text, anchor = _behind_answer(tokenizer, past, history, render, before, after)
    messages = [*past.messages, past.answer, *new]
    return Turn("", past, tokens_behind(tokenizer, anchor, text), text, anchor, after, messages, past.tools)


def tokens_behind(tokenizer: Any, anchor: str, text: str) -> list[int]:
    """Token ids of a text as it is tokenized behind another one; some tokenizers treat the beginning of a text apart."""
    if not text:
        return []
    head, both = tokenizer([anchor, anchor + text], add_special_tokens=False)["input_ids"]
    if both[: len(head)] == head:
        return list(both[len(head) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _shows(rendered: str, text: Any) -> bool:
    return not isinstance(text, str) or text.strip() in rendered


def _behind_answer(
    tokenizer: Any, past: Turn, history: list[dict[str, Any]], render: Render, before: str, after: str
) -> tuple[str, str]:
    """What follows the sampled tokens, and the text that it is tokenized behind."""
    if past.by_token and past.tokens:
        return _behind_token(tokenizer.decode(past.tokens[-1:], skip_special_tokens=False), past, before, after)
    if past.finish != "length":  # at a stop string, which is among the tokens and not in the text
        raise Forked("ended otherwise")
    marked = render([*history[:-1], {"role": "assistant", "content": _MARK}], False).text
    _, mark, end = marked.rpartition(_MARK)
    if not mark or not before.endswith(end):
        raise Forked("rewritten")
    return end + after[len(before) :], _LETTER


def _behind_token(end: str, past: Turn, before: str, after: str) -> tuple[str, str]:
    """The same where the answer ended at a token, which the template must have written too: as the end of the turn, or,
    in formats without one, as the beginning of the next."""
    rest = after[len(before) :]
    answer = before[len(past.prompt_text) :]
    place = answer.rfind(end)
    if end and place >= 0 and not answer[place + len(end) :].strip():
        return answer[place + len(end) :] + rest, end
    if end and rest.lstrip().startswith(end):
        return rest.lstrip()[len(end) :], end
    raise Forked("ended otherwise")
