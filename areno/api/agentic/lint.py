"""Whether a chat template keeps what it wrote: the question on which token-true training of conversations hangs.

Probe conversations are rendered with a made-up answer and then with what could follow it. A template that tells the past
differently afterwards makes conversations fork: nothing is trained wrongly, but branches cost tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Forked, Turn, go_on
from areno.serving.recording import Render
from areno.text.chat import RenderedPrompt, render_generation_prompt

FindingKind = Literal["rewrites history", "drops thinking", "no turn end", "refused"]
Step = Literal["user message", "tool result"]

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "moss"}'}}
_THOUGHT, _SAID = "Probably a plant.", "A small green plant."

_WHAT = {
    "rewrites history": "writes earlier turns anew",
    "drops thinking": "leaves the reasoning of earlier turns out",
    "no turn end": "does not write the token that ends the model's turns",
    "refused": "refuses such a conversation",
}


@dataclass(frozen=True, slots=True)
class TemplateFinding:
    """What a template does when a conversation goes on with ``step``, behind an answer with ``thinking`` or without."""

    kind: FindingKind
    step: Step
    thinking: bool

    def __str__(self) -> str:
        after = f"after a {self.step}" + (", where the model has reasoned" if self.thinking else "")
        if self.kind == "refused":
            return f"the chat template refuses a {self.step} behind an answer; agents that send one get an error"
        return (
            f"the chat template {_WHAT[self.kind]} {after}: such a conversation becomes several training rows with the "
            "same reward, and its earlier turns are computed again"
        )


def lint_chat_template(tokenizer: Any, *, disable_thinking: bool = False) -> list[TemplateFinding]:
    """What will keep conversations from going on in one row; empty for a template that only ever adds."""
    findings = []
    for thinking in (False, True):
        if thinking and (disable_thinking or not _knows_thinking(tokenizer)):
            continue
        for step in ("user message", "tool result"):
            kind = _probe(tokenizer, step, thinking, disable_thinking)  # type: ignore[arg-type]
            if kind is not None:
                findings.append(TemplateFinding(kind, step, thinking))  # type: ignore[arg-type]
    return findings


def _knows_thinking(tokenizer: Any) -> bool:
    source = str(tokenizer.chat_template or "")
    return "think" in source or "reasoning" in source or "thinking" in "".join(tokenizer.get_added_vocab())


def _probe(tokenizer: Any, step: Step, thinking: bool, disable_thinking: bool) -> FindingKind | None:
    tools = [_TOOL] if step == "tool result" else None

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> RenderedPrompt:
        return render_generation_prompt(
            tokenizer, messages, disable_thinking, tools=tools, add_generation_prompt=add_generation_prompt
        )

    try:
        go_on(tokenizer, _past(tokenizer, step, thinking, render), _next(step), render)
    except Forked as forked:
        kinds: dict[str, FindingKind] = {"thinking dropped": "drops thinking", "ended otherwise": "no turn end"}
        return kinds.get(forked.reason, "rewrites history")
    except UsageError:
        return "refused"
    return None


def _past(tokenizer: Any, step: Step, thinking: bool, render: Render) -> Turn:
    asked = [{"role": "user", "content": "What is moss?"}]
    answer: dict[str, Any] = {"role": "assistant", "content": _SAID}
    if step == "tool result":
        answer |= {"content": None, "tool_calls": [_CALL]}
    if thinking:
        answer["reasoning_content"] = _THOUGHT
    end = tokenizer.eos_token_id
    how: dict[str, Any] = {"finish": "length", "by_token": False} if end is None else {"tokens": [end]}
    prompt_text = render([dict(message) for message in asked], True).text
    return Turn("", None, [], "", "", prompt_text, asked, [], answer, **how)


def _next(step: Step) -> Sequence[dict[str, Any]]:
    if step == "tool result":
        return [{"role": "tool", "tool_call_id": _CALL["id"], "name": "look_up", "content": "moss: a plant"}]
    return [{"role": "user", "content": "And fern?"}]
