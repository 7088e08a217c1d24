"""Environments: a game or a task as a class, from which the agent and its reward function are made.

An agent that talks, calls tools and is answered is the same loop for every game: :func:`converse`. So a game says only
what is its own (:class:`Environment`), and two adapters make of it what ``areno train`` asks for::

    run_agent = run_environment(TicTacToe, max_turns=5)   # --agent-fn
    reward_fn = environment_reward(TicTacToe)             # --reward-fn-path

A reward is worked out in another process, from the messages alone: the conversation is replayed on a fresh environment.
An environment must therefore depend on nothing but its record and the answers; draw chance from a seed in the record.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from areno.api.agentic.tools import ToolResult, Toolset
from areno.errors import UsageError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from areno.api.agentic.data import AgentBatch, AgentItem, AgentTrajectory
    from areno.types import RewardRecord

Message = dict[str, Any]
Observation = str | None
Ending = Literal["over", "turn limit", "too long"]
"""By the environment, at the turn limit, or because it grew too long for the model."""

# A client looks through all its connections at the end of each request: many small pools cost much less than a large one.
_SAMPLES_OF_A_CLIENT = 16
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model did in one turn."""

    text: str  # what it said, reasoning in `<think>` left out
    results: Sequence[ToolResult] = ()  # of the tools that it called, in order; they go back to it as they stand


class Environment(Protocol):
    """One game or task. Subclass it, or have the same methods."""

    def reset(self, record: Mapping[str, Any]) -> str | Sequence[Message]:
        """Begin anew with a data row; returns what the model is told: a user message's text, or messages."""
        ...

    def tools(self) -> Sequence[Callable[..., Any]]:
        """What the model may call; see :class:`areno.api.agentic.tools.Tool`. Asked for once after each reset."""
        return ()

    def step(self, answer: Answer) -> Observation | Awaitable[Observation]:
        """Take the model's answer, after its tools have run.

        Returns:
            None where the game is over; else what the model is told next. An empty text adds nothing to the results of
            the tools.
        """
        ...

    def reward(self) -> float | Awaitable[float]:
        """What the conversation so far is worth."""
        ...

    def close(self) -> None:
        """Free what it holds; called once, at the end."""


@dataclass(slots=True)
class Conversation:
    """A conversation that has ended."""

    messages: list[Message]  # the last answer and its results included
    toolset: Toolset  # with the counts of calls and errors
    turns: list[tuple[int, Any]] = field(default_factory=list)  # how many messages were sent, and the response
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
    """Let a model play one environment on a data row; does not close it.

    Args:
        environment: the game.
        record: the data row.
        client: of the server that has the model, under the name ``model``.
        model: in requests.
        max_turns: most answers of the model.
        tool_choice: ``auto``, ``required``, ``none``, or the name of the one tool that must be called.
        request: further fields of the requests, such as ``temperature``.

    Raises:
        openai.OpenAIError: the server refuses or fails.
    """
    from openai import BadRequestError

    conversation = begin_conversation(environment, record)
    fields: dict[str, Any] = {"model": model, **(request or {})}
    if len(conversation.toolset):
        fields |= {"tools": conversation.toolset.schemas, "tool_choice": _choice(tool_choice)}
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
        if response.choices[0].finish_reason == "length" and not (message["content"] or "tool_calls" in message):
            conversation.ending = "too long"
            break
        if not await take_answer(environment, conversation, message):
            conversation.ending = "over"
            break
    return conversation


async def replay(environment: Environment, record: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Bring an environment to where a conversation left it: answers count, everything else follows from them."""
    conversation = begin_conversation(environment, record)
    opening = sum(message["role"] == "assistant" for message in conversation.messages)
    for message in [each for each in messages if each["role"] == "assistant"][opening:]:
        if not await take_answer(environment, conversation, message):
            return


def run_environment(
    make: Callable[[], Environment],
    *,
    max_turns: int = 8,
    tool_choice: str = "auto",
    request: Mapping[str, Any] | None = None,
) -> Callable[[Any, AgentBatch], AsyncIterator[AgentTrajectory]]:
    """An agent function, as ``--agent-fn`` takes it, that lets the model play an environment.

    ``make`` is the environment's class, or anything else that makes one; the rest is as in :func:`converse`, and what
    ``request`` leaves out, ``--temperature`` and the like decide. The function yields an ``AgentTrajectory`` for each
    sample that has come to its end. Where one fails, the others are played to their end first, and then its error is
    raised. Raises UsageError: the package ``openai`` is not installed.
    """
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError as error:
        raise UsageError("an agent made of an environment needs the OpenAI client: pip install openai") from error

    def make_client(ctx: Any) -> AsyncOpenAI:
        """A client of a session: it has deadlines of its own, and at its address on this machine there are no certificates."""
        http_client = DefaultAsyncHttpxClient(verify=False, timeout=None)
        return AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0, http_client=http_client)

    async def run_agent(ctx: Any, batch: AgentBatch) -> AsyncIterator[AgentTrajectory]:
        items = list(batch.iter_samples())
        clients = [make_client(ctx) for _ in range(0, len(items), _SAMPLES_OF_A_CLIENT)]
        options: dict[str, Any] = {"max_turns": max_turns, "tool_choice": tool_choice, "request": request}
        playing = []
        for index, item in enumerate(items):
            client = clients[index // _SAMPLES_OF_A_CLIENT].with_options(api_key=ctx.get_api_key(item))
            playing.append(asyncio.create_task(_play(make, item, client, options)))
        errors = []
        try:
            for next_one in asyncio.as_completed(playing):
                try:
                    yield await next_one
                except Exception as error:  # whatever goes wrong in one sample leaves the others alone
                    errors.append(error)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            for client in clients:
                await client.close()
        if errors:
            raise errors[0]

    return run_agent


def environment_reward(make: Callable[[], Environment]) -> Callable[[RewardRecord], Awaitable[float]]:
    """A reward function that replays the conversation and asks the environment what it is worth."""

    async def reward_fn(record: RewardRecord) -> float:
        environment = make()
        try:
            await replay(environment, record.source_record, record.messages)
            reward: float = await _settled(environment.reward())
            return reward
        finally:
            environment.close()

    return reward_fn


def generate_records(
    draw: Callable[..., Mapping[str, Any]], flags: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> None:
    """The program of a data generator: ``--output FILE --count N --seed S``, one JSON object a line.

    Equal seeds give equal files, and a longer file begins like a shorter one.

    Args:
        draw: makes one record from a ``random.Random``, and from the flags as keyword arguments.
        flags: further switches (``held_out`` becomes ``--held-out``), with their help.
        argv: the command line; that of the process unless given.
    """
    parser = argparse.ArgumentParser(description=sys.modules[draw.__module__].__doc__)
    parser.add_argument("--output", required=True, type=Path, help="JSON lines file to write")
    parser.add_argument("--count", type=int, default=128, help="how many records (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2026, help="equal seeds give equal records (default: %(default)s)")
    for name, text in (flags or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    given = vars(parser.parse_args(argv))
    output, count, seed = given.pop("output"), given.pop("count"), given.pop("seed")
    records = (draw(random.Random(f"{seed}:{index}"), **given) for index in range(count))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    sys.stdout.write(f"{count} records in {output}\n")


def environment_rows(
    make: Callable[[], Environment], records: Iterable[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """What a data loader returns: the records, each with the ``prompt`` that its environment opens with.

    Raises KeyError: a row lacks ``key``, which its environment cannot do without; the message lists what it has.
    """
    rows = []
    for record in records:
        if key not in record:
            raise KeyError(f"a row needs `{key}`; this one has {', '.join(sorted(record))}; use the data generator")
        environment = make()
        rows.append({**record, "prompt": environment.reset(record)})
        environment.close()
    return rows


async def _play(
    make: Callable[[], Environment], item: AgentItem, client: AsyncOpenAI, options: Mapping[str, Any]
) -> AgentTrajectory:
    from areno.api.agentic.data import AgentTrajectory, AgentTrajectoryTurn

    environment = make()
    try:
        played = await converse(environment, item.record, client, **options)
    finally:
        environment.close()
    tools = played.toolset.schemas
    choice = _choice(options["tool_choice"]) if tools else None
    # The last turn has all messages, so that the results of the last calls are seen too.
    ends = [sent for sent, _ in played.turns[:-1]] + [len(played.messages)]
    turns = [
        AgentTrajectoryTurn(
            item=item, messages=played.messages[:end], response=response, tools=tools, tool_choice=choice
        )
        for end, (_, response) in zip(ends, played.turns, strict=False)
    ]
    return AgentTrajectory(turns=turns)


def begin_conversation(environment: Environment, record: Mapping[str, Any]) -> Conversation:
    """Reset an environment; the conversation has its opening messages."""
    opening = environment.reset(record)
    messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else [dict(each) for each in opening]
    return Conversation(messages, Toolset(environment.tools()))


async def take_answer(environment: Environment, conversation: Conversation, message: Mapping[str, Any]) -> bool:
    """Run the tools that an answer calls, show it to the environment, and add all that to the conversation.

    Returns:
        Whether the game goes on.

    Raises:
        UsageError: the environment adds nothing to an answer that called no tool.
    """
    calls = message.get("tool_calls") or []
    results = []
    for call in calls:
        function = call["function"]
        results.append(await conversation.toolset.call(function["name"], function["arguments"], call.get("id") or ""))
    conversation.messages += [dict(message), *(result.message() for result in results)]
    text = _THINKING.sub("", message.get("content") or "").strip()
    observation = await _settled(environment.step(Answer(text, results)))
    if observation:
        conversation.messages.append({"role": "user", "content": observation})
    elif observation is not None and not calls:
        raise UsageError(
            f"{type(environment).__name__}.step returned an empty text after an answer that called no tool; "
            "return what the model is told, or None to end"
        )
    return observation is not None


def _choice(tool_choice: str) -> str | dict[str, Any]:
    if tool_choice in ("auto", "required", "none"):
        return tool_choice
    return {"type": "function", "function": {"name": tool_choice}}


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
