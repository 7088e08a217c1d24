"""Creates an agent and a reward function from an environment, which is a class for a game or task.

An environment implements the methods of :class:`Environment`. The code in ``conversation_loop`` runs the turns and tools of
all environments. Two functions create the hooks of ``areno train`` from the class::

    run_agent = run_environment(TicTacToe, max_turns=5)   # --agent-fn
    reward_fn = environment_reward(TicTacToe)             # --reward-fn-path

To compute a reward, another process replays the conversation's messages in a new environment. The behavior of an
environment must therefore depend only on the data row and the answers. Seed random numbers from the data row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.api.agentic.conversation_loop import (
    Answer,
    Environment,
    converse,
    cut_off,
    replay,
    settled,
    tool_choice_field,
)
from areno.errors import UsageError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from areno.api.agentic.data import AgentBatch, AgentItem, AgentTrajectory
    from areno.types import RewardRecord

__all__ = [
    "Answer",
    "Environment",
    "converse",
    "environment_reward",
    "environment_rows",
    "generate_records",
    "replay",
    "run_environment",
]

# A client scans all its connections after each request, so several small pools are much faster than one large pool.
_SAMPLES_PER_CLIENT = 16


def run_environment(
    make: Callable[[], Environment],
    *,
    max_turns: int = 8,
    tool_choice: str = "auto",
    request: Mapping[str, Any] | None = None,
) -> Callable[[Any, AgentBatch], AsyncIterator[AgentTrajectory]]:
    """Return an agent function for ``--agent-fn`` that runs the model in an environment.

    ``make`` is the environment's class, or a function that creates an environment. See :func:`converse` for
    ``max_turns``, ``tool_choice`` and ``request``. Fields of ``request`` override the run's sampling parameters. The
    agent function yields an ``AgentTrajectory`` for each finished sample. If a sample fails, the other samples
    continue, and the first error is raised at the end. Raises UsageError if the package ``openai`` is not installed.
    """
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError as error:
        raise UsageError("run_environment needs the package openai; run: pip install openai") from error

    def make_client(ctx: Any) -> AsyncOpenAI:
        """The client has no timeout, because the session enforces timeouts."""
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
    """Return a reward function that replays a conversation in a new environment and returns the environment's reward."""

    async def reward_fn(record: RewardRecord) -> float:
        environment, messages = make(), record.messages
        if messages and cut_off(messages[-1], record.metadata.get("finish_reason")):
            messages = messages[:-1]
        try:
            await replay(environment, record.source_record, messages)
            reward: float = await settled(environment.reward())
            return reward
        finally:
            environment.close()

    return reward_fn


def generate_records(
    draw: Callable[..., Mapping[str, Any]], flags: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> None:
    """Run a data generator that takes the command-line options ``--output FILE --count N --seed S``.

    ``FILE`` gets one JSON record per line. Equal seeds give equal records, and a larger count only adds records at the
    end.

    Args:
        draw: function that creates one record from a ``random.Random`` and one keyword argument per flag in ``flags``: True
            if the flag is set, otherwise False.
        flags: names and help texts of additional flags. The name ``held_out`` becomes ``--held-out``.
        argv: command-line arguments; None uses the arguments of the process.
    """
    parser = argparse.ArgumentParser(description=sys.modules[draw.__module__].__doc__)
    parser.add_argument("--output", required=True, type=Path, help="JSON lines file to write")
    parser.add_argument("--count", type=int, default=128, help="number of records (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the records (default: %(default)s)")
    for name, text in (flags or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    options = vars(parser.parse_args(argv))
    output, count, seed = options.pop("output"), options.pop("count"), options.pop("seed")
    records = (draw(random.Random(f"{seed}:{index}"), **options) for index in range(count))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    sys.stdout.write(f"wrote {count} records to {output}\n")


def environment_rows(
    make: Callable[[], Environment], records: Iterable[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Add a ``prompt`` to each record, for a data loader. The prompt is what :meth:`Environment.reset` returns.

    ``key`` is the name of a field that the environment reads. Raises KeyError if a record lacks this field.
    """
    rows = []
    for record in records:
        if key not in record:
            raise KeyError(
                f"a row lacks `{key}` and has only {', '.join(sorted(record))}; add this field to every row, "
                "or write the rows with the data generator of this environment"
            )
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
    choice = tool_choice_field(options["tool_choice"]) if tools else None
    # The last turn has all messages, to include the results of the last tool calls.
    ends = [sent for sent, _ in conversation.turns[:-1]] + [len(conversation.messages)]
    turns = [
        AgentTrajectoryTurn(
            item=item, messages=conversation.messages[:end], response=response, tools=tools, tool_choice=choice
        )
        for end, (_, response) in zip(ends, conversation.turns, strict=False)
    ]
    return AgentTrajectory(turns=turns)
