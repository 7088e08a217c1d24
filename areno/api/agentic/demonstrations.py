"""Demonstrations: an expert acts in an environment, and each answer of the expert becomes a row for SFT.

RL needs a model that succeeds at least occasionally, and training on demonstrations produces such a model. The model's
chat template renders the rows and the tools, so that SFT trains on the same tokens as RL with an agent.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.api.agentic.conversation_loop import Environment, Message, begin_conversation, take_answer
from areno.errors import UsageError
from areno.text.chat import render_generation_prompt

Expert = Callable[[Any], Message]
"""Takes an environment and returns the expert's next answer. Use :func:`says` or :func:`calls` to create the answer."""


@dataclass(frozen=True, slots=True)
class Course:
    """A task to demonstrate, with an expert that solves it.

    Attributes:
        make: function that creates the environment of a conversation.
        draw: function that receives a random generator and returns a random data row. The row is passed to
            ``Environment.reset``.
        expert: function that gives the answers.
        max_turns: maximum number of answers per conversation.
    """

    make: Callable[[], Environment]
    draw: Callable[[random.Random], Mapping[str, Any]]
    expert: Expert
    max_turns: int = 8

    def conversations(self, count: int, seed: int) -> list[tuple[list[Message], list[dict[str, Any]]]]:
        """Run ``count`` conversations in which ``expert`` gives the answers, and return the messages and tools of each.

        Equal seeds give equal conversations.
        """
        return [asyncio.run(self._play(random.Random(f"{seed}:{index}"))) for index in range(count)]

    async def _play(self, draws: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
        environment = self.make()
        try:
            return await demonstrate(environment, self.draw(draws), self.expert, max_turns=self.max_turns)
        finally:
            environment.close()


def says(text: str) -> Message:
    """Create an answer that consists of text."""
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, Mapping[str, Any]]) -> Message:
    """Create an answer that calls tools. Each call is a pair of tool name and arguments."""
    tool_calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


async def demonstrate(
    environment: Environment, record: Mapping[str, Any], expert: Expert, *, max_turns: int = 8
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Run a conversation of an expert with an environment. Returns the messages, and the tools in OpenAI's format."""
    conversation = begin_conversation(environment, record)
    for _ in range(max_turns):
        if not await take_answer(environment, conversation, expert(environment)):
            break
    return conversation.messages, conversation.toolset.schemas


def demonstration_rows(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return one row per answer of a conversation: ``prompt`` and ``response``, rendered by the chat template.

    Raises:
        UsageError: the template rewrites earlier messages, so prompt and response cannot be separated.
    """
    rows = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_generation_prompt(tokenizer, messages[:index], tools=tools).text
        longer = render_generation_prompt(
            tokenizer, messages[: index + 1], tools=tools, add_generation_prompt=False
        ).text
        if not longer.startswith(prompt):
            raise UsageError(
                f"adding message {index} makes the chat template rewrite the earlier messages, so prompt and response cannot "
                "be separated; use another template"
            )
        response = longer[len(prompt) :]
        if tokenizer.eos_token and tokenizer.eos_token in response:
            response = response.partition(tokenizer.eos_token)[0]  # SFT adds it again
        else:
            response = response.rstrip()  # the template ends turns with another token, after which it may add a newline
        rows.append({"prompt": prompt, "response": response})
    return rows
