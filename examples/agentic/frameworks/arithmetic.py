"""Problem text and calculator function that the agents of this folder share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "calculator"))

from calculator import Calculator

from areno.api.agentic import AgentBatch, AgentItem, AgentTrajectory
from areno.api.agentic.tools import ToolError

MAX_TURNS = 8


def calculate(left: int, operator: Literal["+", "-", "*"], right: int) -> str:
    """The result of one operation."""
    try:
        return str(Calculator.operate(left, operator, right))
    except (ToolError, KeyError, TypeError) as error:  # the model's mistake, reported to the model
        return f"error: {error}"


def question(record: Mapping[str, Any]) -> str:
    """Return the problem of a record as text."""
    return Calculator().reset(record)


async def each_item(
    ctx: Any, batch: AgentBatch, solve: Callable[[AgentItem, str], Awaitable[None]]
) -> list[AgentTrajectory]:
    """Let an agent solve all tasks concurrently. areno records the requests with a task's key as the trajectory of the task."""

    async def one(item: AgentItem) -> AgentTrajectory:
        await solve(item, question(item.record))
        return ctx.trajectory(item)

    return await asyncio.gather(*(one(item) for item in batch.iter_samples()))
