"""Demonstrations: an expert plays an environment, and every answer becomes a row for supervised training.

Reinforcement learning needs a model that does the right thing now and then. Rows come out rendered by the model's own
chat template, tools included, so that supervised training sees the very tokens that agents will meet.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.api.agentic.environment import Environment, Message, begin_conversation, take_answer
from areno.errors import UsageError
from areno.text.chat import render_generation_prompt

Expert = Callable[[Any], Message]
"""Looks at the environment and answers; see :func:`says` and :func:`calls`."""


@dataclass(frozen=True, slots=True)
class Course:
    """What there is to demonstrate: ``make`` makes the environment, ``draw`` a record from a ``random.Random``."""

    make: Callable[[], Environment]
    draw: Callable[[random.Random], Mapping[str, Any]]
    expert: Expert
    max_turns: int = 8

    def conversations(self, count: int, seed: int) -> list[tuple[list[Message], list[dict[str, Any]]]]:
        """So many conversations of the expert, each with its tools; equal seeds give equal ones."""
        return [asyncio.run(self._play(random.Random(f"{seed}:{index}"))) for index in range(count)]

    async def _play(self, draws: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
        environment = self.make()
        try:
            return await demonstrate(environment, self.draw(draws), self.expert, max_turns=self.max_turns)
        finally:
            environment.close()


def says(text: str) -> Message:
    """An answer of text."""
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, Mapping[str, Any]]) -> Message:
    """An answer that calls tools: pairs of name and arguments."""
    made = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


async def demonstrate(
    environment: Environment, record: Mapping[str, Any], expert: Expert, *, max_turns: int = 8
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Let an expert play; returns the conversation, and the tools in OpenAI's form."""
    conversation = begin_conversation(environment, record)
    for _ in range(max_turns):
        if not await take_answer(environment, conversation, expert(environment)):
            break
    return conversation.messages, conversation.toolset.schemas


def demonstration_rows(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """One row with ``prompt`` and ``response`` for each answer of a conversation, rendered by the chat template.

    Raises:
        UsageError: the template shows a conversation differently once it goes on, so that no response can be cut out.
    """
    rows = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_generation_prompt(tokenizer, messages[:place], tools=tools).text
        longer = render_generation_prompt(tokenizer, messages[: place + 1], tools=tools).text
        if not longer.startswith(prompt):
            raise UsageError(f"the chat template rewrites the messages before message {place}; use one that does not")
        response = longer[len(prompt) :]
        if tokenizer.eos_token:
            response = response.partition(tokenizer.eos_token)[0]
        rows.append({"prompt": prompt, "response": response})
    return rows
