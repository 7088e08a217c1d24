"""Checks whether a chat template is append-only, so that a conversation can become a single training row.

The check renders sample conversations, first up to an answer and then with one more message. If the template rewrites
earlier turns when a message is added, the conversation forks: the later turns need another training row. Training stays
correct.
"""

from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Forked, Turn, continue_turn
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
_ASKED = {"role": "user", "content": "What is moss?"}
_RESULT = {"role": "tool", "tool_call_id": _CALL["id"], "name": "look_up", "content": "moss: a plant"}

# Contents of a sample answer, and of the message that follows it.
_STEPS: dict[Step, tuple[dict[str, Any], dict[str, Any]]] = {
    "user message": ({"content": "A small green plant."}, {"role": "user", "content": "And fern?"}),
    "tool result": ({"content": None, "tool_calls": [_CALL]}, _RESULT),
}
_KINDS: dict[str, FindingKind] = {"thinking dropped": "drops thinking", "ended otherwise": "no turn end"}
_WHAT = {
    "rewrites history": "rewrites earlier turns",
    "drops thinking": "drops the reasoning of earlier turns",
    "no turn end": "does not write the model's end-of-turn token",
}


@dataclass(frozen=True, slots=True)
class TemplateFinding:
    """A problem that a chat template has when another message follows an answer of the model.

    Attributes:
        kind: the problem; ``refused`` means that the template rejects the message.
        step: kind of the message that follows the answer.
        thinking: whether the answer has reasoning.
    """

    kind: FindingKind
    step: Step
    thinking: bool

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"the chat template rejects a {self.step} after an answer, so agents that send a {self.step} get an error"
        answer = "an answer with reasoning" if self.thinking else "an answer"
        return (
            f"the chat template {_WHAT[self.kind]} when a {self.step} follows {answer}, so the recorded tokens cannot be "
            "continued: the conversation forks into several training rows with the same reward, and the engine prefills "
            "the earlier turns again"
        )


def lint_chat_template(tokenizer: Any, *, disable_thinking: bool = False) -> list[TemplateFinding]:
    """Return the problems of a tokenizer's chat template in multi-turn conversations.

    The list is empty if the template accepts user messages and tool results after an answer, leaves the text of earlier
    messages unchanged, and ends answers with the model's end-of-turn token.
    """
    findings = []
    for thinking in (False, True):
        if thinking and (disable_thinking or not _knows_thinking(tokenizer)):
            continue
        for step in _STEPS:
            kind = _probe(tokenizer, step, thinking, disable_thinking)
            if kind is not None:
                findings.append(TemplateFinding(kind, step, thinking))
    return findings


def _knows_thinking(tokenizer: Any) -> bool:
    source = str(tokenizer.chat_template or "")
    return "think" in source or "reasoning" in source or "thinking" in "".join(tokenizer.get_added_vocab())


def _probe(tokenizer: Any, step: Step, thinking: bool, disable_thinking: bool) -> FindingKind | None:
    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> RenderedPrompt:
        tools = [_TOOL] if step == "tool result" else None
        return render_generation_prompt(
            tokenizer, messages, disable_thinking, tools=tools, add_generation_prompt=add_generation_prompt
        )

    contents, following = _STEPS[step]
    answer = {"role": "assistant", **contents, **({"reasoning_content": "Probably a plant."} if thinking else {})}
    end = tokenizer.eos_token_id
    how: dict[str, Any] = {"finish": "length", "by_token": False} if end is None else {"tokens": [end]}
    try:
        prompt_text = render([dict(_ASKED)], True).text
        continue_turn(
            tokenizer, Turn("", None, [], "", "", prompt_text, [_ASKED], [], answer, **how), [following], render
        )
    except Forked as forked:
        return _KINDS.get(forked.reason, "rewrites history")
    except UsageError:
        return "refused"
    return None
