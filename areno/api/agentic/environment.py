"""Environments: a game or task as a class, from which agent and reward function are derived.

The agent loop is the same for all games (:func:`converse`). A game only implements :class:`Environment`, and two adapters turn
it into the hooks of ``areno train``::

    run_agent = run_environment(TicTacToe, max_turns=5)   # --agent-fn
    reward_fn = environment_reward(TicTacToe)             # --reward-fn-path

A reward is computed in another process, from the messages only: the conversation is replayed in a new environment. An
environment must therefore only depend on its record and the answers; seed randomness from the record.
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
"""How a conversation ended: by the environment, at the turn limit, or because it exceeds the model's context."""

# A client scans all its connections after each request, so several small pools are much faster than one large pool.
_SAMPLES_PER_CLIENT = 16
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer in one turn."""

    text: str  # text without reasoning in `<think>`
    results: Sequence[ToolResult] = ()  # tool calls in order; they are sent back unchanged


class Environment(Protocol):
    """A game or task. Subclass it, or implement the same methods."""

    def reset(self, record: Mapping[str, Any]) -> str | Sequence[Message]:
        """Start with a data row. Returns the opening: the text of a user message, or a list of messages."""
        ...

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the tools; see :class:`areno.api.agentic.tools.Tool`. Called once after each reset."""
        return ()

    def step(self, answer: Answer) -> Observation | Awaitable[Observation]:
        """Process the model's answer, after its tools have run.

        Returns:
            None if the game is over; otherwise the next user message. An empty string adds no message to the tool results.
        """
        ...

    def reward(self) -> float | Awaitable[float]:
        """Return the reward of the conversation so far."""
        ...

    def close(self) -> None:
        """Release resources; called once, at the end."""


@dataclass(slots=True)
class Conversation:
    """A finished conversation."""

    messages: list[Message]  # all messages, including the last answer and its tool results
    toolset: Toolset  # tools, with the numbers of calls and errors
    turns: list[tuple[int, Any]] = field(default_factory=list)  # number of request messages, and the response
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
    """Let a model play an environment on a data row, without closing it.

    Args:
        environment: the game.
        record: the data row.
        client: client of the model's server.
        model: model name in requests.
        max_turns: maximum number of answers.
        tool_choice: ``auto``, ``required``, ``none``, or the name of the tool to call.
        request: additional fields of the requests, such as ``temperature``.

    Raises:
        openai.OpenAIError: a request failed.
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
    """Replay the answers of a conversation in an environment."""
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
    """Return an agent function for ``--agent-fn`` in which the model plays an environment.

    ``make`` is the environment's class or a factory; for the other arguments see :func:`converse`. The run's sampling
    parameters apply unless ``request`` sets others. The function yields an ``AgentTrajectory`` for each finished sample; an
    error is raised after all other samples have finished. Raises UsageError if the package ``openai`` is not installed.
    """
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError as error:
        raise UsageError("run_environment needs the OpenAI client: pip install openai") from error

    def make_client(ctx: Any) -> AsyncOpenAI:
        """Create a client. The session enforces timeouts, and its local address has no certificates to verify."""
        http_client = DefaultAsyncHttpxClient(verify=False, timeout=None)
        return AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0, http_client=http_client)

    async def run_agent(ctx: Any, batch: AgentBatch) -> AsyncIterator[AgentTrajectory]:
        items = list(batch.iter_samples())
        clients = [make_client(ctx) for _ in range(0, len(items), _SAMPLES_PER_CLIENT)]
        options: dict[str, Any] = {"max_turns": max_turns, "tool_choice": tool_choice, "request": request}
        playing = []
        for index, item in enumerate(items):
            client = clients[index // _SAMPLES_PER_CLIENT].with_options(api_key=ctx.get_api_key(item))
            playing.append(asyncio.create_task(_play(make, item, client, options)))
        errors = []
        try:
            for finished in asyncio.as_completed(playing):
                try:
                    yield await finished
                except Exception as error:  # an error does not affect the other samples
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
    """Return a reward function that replays the conversation and returns the environment's reward."""

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
    """Run the command line of a data generator, ``--output FILE --count N --seed S``, which writes JSON lines.

    Equal seeds give equal files, and a longer file starts with the records of a shorter one.

    Args:
        draw: creates one record from a ``random.Random``, with the flags as keyword arguments.
        flags: additional switches (``held_out`` becomes ``--held-out``), with their help.
        argv: the command line; default is that of the process.
    """
    parser = argparse.ArgumentParser(description=sys.modules[draw.__module__].__doc__)
    parser.add_argument("--output", required=True, type=Path, help="JSON lines file to write")
    parser.add_argument("--count", type=int, default=128, help="number of records (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2026, help="equal seeds give equal records (default: %(default)s)")
    for name, text in (flags or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    options = vars(parser.parse_args(argv))
    output, count, seed = options.pop("output"), options.pop("count"), options.pop("seed")
    records = (draw(random.Random(f"{seed}:{index}"), **options) for index in range(count))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    sys.stdout.write(f"{count} records in {output}\n")


def environment_rows(
    make: Callable[[], Environment], records: Iterable[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Return the records, each with the opening of its environment as ``prompt``, for a data loader.

    Raises KeyError: a row lacks ``key``, which its environment needs.
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
        conversation = await converse(environment, item.record, client, **options)
    finally:
        environment.close()
    tools = conversation.toolset.schemas
    choice = _choice(options["tool_choice"]) if tools else None
    # The last turn has all messages, to include the results of the last tool calls.
    ends = [sent for sent, _ in conversation.turns[:-1]] + [len(conversation.messages)]
    turns = [
        AgentTrajectoryTurn(
            item=item, messages=conversation.messages[:end], response=response, tools=tools, tool_choice=choice
        )
        for end, (_, response) in zip(ends, conversation.turns, strict=False)
    ]
    return AgentTrajectory(turns=turns)


def begin_conversation(environment: Environment, record: Mapping[str, Any]) -> Conversation:
    """Reset an environment, and return a conversation with its opening messages."""
    opening = environment.reset(record)
    messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else [dict(each) for each in opening]
    return Conversation(messages, Toolset(environment.tools()))


async def take_answer(environment: Environment, conversation: Conversation, message: Mapping[str, Any]) -> bool:
    """Run the tools that an answer calls, pass it to the environment, and extend the conversation.

    Returns:
        Whether the game continues.

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
    observation = await _settled(environment.step(Answer(text, results)))
    if observation:
        conversation.messages.append({"role": "user", "content": observation})
    elif observation is not None and not calls:
        raise UsageError(
            f"{type(environment).__name__}.step returned an empty string after an answer without tool calls; "
            "return the next user message, or None to end"
        )
    return observation is not None


def _choice(tool_choice: str) -> str | dict[str, Any]:
    if tool_choice in ("auto", "required", "none"):
        return tool_choice
    return {"type": "function", "function": {"name": tool_choice}}


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
