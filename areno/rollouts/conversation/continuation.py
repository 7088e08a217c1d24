"""The tokens that a conversation goes on with: those that are known, and of the new request only what is new in it.

The template renders the conversation twice, as it was when the model had answered, and with what was added since. Where
the first text is the beginning of the second, the rest is tokenized and appended behind what the model said: nothing
that it said is ever tokenized again. Where it is not, the template tells the past differently now (most often without
the reasoning), and going on from the known tokens would train on what a deployed model never sees; :class:`Forked`
then says why the request must begin a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.serving.recording import Render

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An answered request.

    Attributes:
        messages: of the request, and the answer as the last.
        prompt_text: what the template made of the request, the opening of the answer included.
        last_token: the last sampled one; None where there is none.
        by_token: the answer ended at a stop token.
        finish: ``stop`` or ``length``.
    """

    messages: Sequence[Mapping[str, Any]]
    prompt_text: str
    last_token: int | None
    by_token: bool
    finish: str


@dataclass(frozen=True, slots=True)
class Addition:
    """What a conversation goes on with: the part of the prompt's ``text`` that was ``added`` behind the known tokens.

    ``tokens`` are its tokens, made behind the text ``anchor``, see :func:`tokens_behind`.
    """

    text: str
    added: str
    tokens: list[int]
    anchor: str


def go_on(tokenizer: Any, past: Past, new: Sequence[Mapping[str, Any]], render: Render) -> Addition:
    """Continue an answered request with further messages, of which there may be none.

    Raises:
        Forked: the known tokens are not how the template tells the past now.
        UsageError: the template refuses the messages.
    """
    history = [dict(message) for message in past.messages]
    before = render(history, False).text
    after = render([*history, *map(dict, new)], True).text
    if not (after.startswith(past.prompt_text) and after.startswith(before)):
        raise Forked(_why_rewritten(past, history, after))
    answer = before[len(past.prompt_text) :]
    if not _shows(answer, history[-1].get("reasoning_content")):
        raise Forked("thinking dropped")
    if not _shows(answer, history[-1].get("content")):
        raise Forked("rewritten")
    added, anchor = _behind_answer(tokenizer, past, history, render, before, after)
    return Addition(after, added, tokens_behind(tokenizer, anchor, added), anchor)


def tokens_behind(tokenizer: Any, anchor: str, text: str) -> list[int]:
    """Token ids of a text as it is tokenized behind another one; some tokenizers treat the beginning of a text apart."""
    if not text:
        return []
    head, both = tokenizer([anchor, anchor + text], add_special_tokens=False)["input_ids"]
    if both[: len(head)] == head:
        return list(both[len(head) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _why_rewritten(past: Past, history: Sequence[Mapping[str, Any]], after: str) -> ForkReason:
    thoughts = [str(message.get("reasoning_content") or "").strip() for message in history]
    return "thinking dropped" if any(thought and thought not in after for thought in thoughts) else "rewritten"


def _shows(rendered: str, text: Any) -> bool:
    return not isinstance(text, str) or text.strip() in rendered


def _behind_answer(
    tokenizer: Any, past: Past, history: list[dict[str, Any]], render: Render, before: str, after: str
) -> tuple[str, str]:
    """What follows the sampled tokens, and the text that it is tokenized behind."""
    if past.by_token and past.last_token is not None:
        return _behind_token(tokenizer.decode([past.last_token], skip_special_tokens=False), past, before, after)
    if past.finish != "length":  # at a stop string, which is among the tokens and not in the text
        raise Forked("ended otherwise")
    marked = render([*history[:-1], {"role": "assistant", "content": _MARK}], False).text
    found = marked.rfind(_MARK)
    end = marked[found + len(_MARK) :]
    if found < 0 or not before.endswith(end):
        raise Forked("rewritten")
    return end + after[len(before) :], _LETTER


def _behind_token(end: str, past: Past, before: str, after: str) -> tuple[str, str]:
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
