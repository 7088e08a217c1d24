"""The conversation loop of all environments, and the protocol of an environment.

:func:`converse` repeats three stages: the model answers, the tool calls in the answer are executed, and the environment
takes a step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from areno.api.agentic.tools import ToolResult, Toolset
from areno.errors import UsageError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Message = dict[str, Any]
Observation = str | None
Ending = Literal["over", "turn limit", "too long"]
"""Why a conversation ended: the environment ended it, the turn limit was reached, or no room was left for an answer."""


_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer in one turn."""

    text: str  # text without reasoning in `<think>`
    results: Sequence[ToolResult] = ()  # results of the tool calls, in order; the model receives them unchanged


class Environment(Protocol):
    """Protocol of a game or task. Subclass this class, or implement the same methods."""

    def reset(self, record: Mapping[str, Any]) -> str | Sequence[Message]:
        """Start a new game or task from a data row. Returns the first messages, or the text of a single user message."""
        ...

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the tools; see :class:`areno.api.agentic.tools.Tool`. Called once per conversation, after :meth:`reset`."""
        return ()

    def step(self, answer: Answer) -> Observation | Awaitable[Observation]:
        """Process the model's answer, after the tools called in the answer have run.

        Returns:
            The next user message, or None to end the conversation. If the answer contained tool calls, the method may return
            an empty string: the conversation then continues without a user message.
        """
        ...

    def reward(self) -> float | Awaitable[float]:
        """Return the reward of the conversation so far."""
        ...

    def close(self) -> None:
        """Release resources. Called once, at the end of the conversation."""


@dataclass(slots=True)
class Conversation:
    """A running or finished conversation."""

    messages: list[Message]  # all messages, including the last answer and its tool results
    toolset: Toolset  # tools, with the numbers of calls and errors
    turns: list[tuple[int, Any]] = field(default_factory=list)  # per answer: number of messages sent, and the response
    ending: Ending = "turn limit"


async def converse(
    environment: Environment,
    record: Mapping[str, Any],
    client: AsyncOpenAI,
    *,
    model: str = "policy",
    max_turns: int = 8,
    tool_choice: str = "auto",
    request: Mapping[str, Any] | None = None,
) -> Conversation:
    """Run a conversation of a model with an environment. Resets the environment first, but does not close it.

    Args:
        environment: game or task.
        record: data row for :meth:`Environment.reset`.
        client: OpenAI client of the model's server.
        model: model name in requests.
        max_turns: maximum number of the model's answers.
        tool_choice: ``auto``, ``required``, ``none``, or the name of the tool to call.
        request: additional fields of the requests, such as ``temperature``.

    Raises:
        openai.OpenAIError: a request failed.
    """
    from openai import BadRequestError

    conversation = begin_conversation(environment, record)
    fields: dict[str, Any] = {"model": model, **(request or {})}
    if len(conversation.toolset):
        fields |= {"tools": conversation.toolset.schemas, "tool_choice": tool_choice_field(tool_choice)}
    for _ in range(max_turns):
        try:
            response = await client.chat.completions.create(**{**fields, "messages": conversation.messages})
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            conversation.ending = "too long"
            break
        conversation.turns.append((len(conversation.messages), response))
        message: Message = {"content": "", **response.choices[0].message.model_dump(exclude_none=True)}
        if cut_off(message, response.choices[0].finish_reason):
            conversation.ending = "too long"
            break
        if not await take_answer(environment, conversation, message):
            conversation.ending = "over"
            break
    return conversation


def cut_off(message: Mapping[str, Any], finish_reason: str | None) -> bool:
    """Return whether an answer reached a token limit before its first text or tool call.

    Such an answer is not passed to the environment.
    """
    return finish_reason == "length" and not (message.get("content") or message.get("tool_calls"))


async def replay(environment: Environment, record: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Replay the answers of a finished conversation in a new environment."""
    conversation = begin_conversation(environment, record)
    opening = sum(message["role"] == "assistant" for message in conversation.messages)
    for message in [each for each in messages if each["role"] == "assistant"][opening:]:
        if not await take_answer(environment, conversation, message):
            return


def begin_conversation(environment: Environment, record: Mapping[str, Any]) -> Conversation:
    """Reset an environment, and return a conversation with its opening messages."""
    opening = environment.reset(record)
    messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else [dict(each) for each in opening]
    return Conversation(messages, Toolset(environment.tools()))


async def take_answer(environment: Environment, conversation: Conversation, message: Mapping[str, Any]) -> bool:
    """Run the tools that an answer calls, then :meth:`Environment.step`.

    The answer, the results of the tools and the next user message are added to the conversation.

    Returns:
        Whether the conversation continues. It ends if ``step`` has returned None.

    Raises:
        UsageError: the environment returned an empty string after an answer without tool calls.
    """
    calls = message.get("tool_calls") or []
    results = []
    for call in calls:
        function = call["function"]
        results.append(await conversation.toolset.call(function["name"], function["arguments"], call.get("id") or ""))
    conversation.messages += [dict(message), *(result.message() for result in results)]
    text = _THINKING.sub("", message.get("content") or "").strip()
    observation = await settled(environment.step(Answer(text, results)))
    if observation:
        conversation.messages.append({"role": "user", "content": observation})
    elif observation is not None and not calls:
        raise UsageError(
            f"{type(environment).__name__}.step returned an empty string after an answer without tool calls; "
            "return the next user message, or None to end the conversation"
        )
    return observation is not None


def tool_choice_field(tool_choice: str) -> str | dict[str, Any]:
    """Return a request's field ``tool_choice``, given ``auto``, ``required``, ``none`` or the name of a tool."""
    if tool_choice in ("auto", "required", "none"):
        return tool_choice
    return {"type": "function", "function": {"name": tool_choice}}


async def settled(value: Any) -> Any:
    """If ``value`` is awaitable, await it and return the result. Otherwise, return ``value`` itself."""
    return await value if inspect.isawaitable(value) else value
