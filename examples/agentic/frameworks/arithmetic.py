"""What all agents here are given: the problem in words, and the calculator as a plain function."""

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
    except (ToolError, KeyError, TypeError) as error:  # the model's mistake, which it is told
        return f"error: {error}"


def question(record: Mapping[str, Any]) -> str:
    """A record's problem in words."""
    return Calculator().reset(record)


async def each_item(
    ctx: Any, batch: AgentBatch, solve: Callable[[AgentItem, str], Awaitable[None]]
) -> list[AgentTrajectory]:
    """Let an agent solve all tasks at once; what was said under a task's key is its trajectory."""

    async def one(item: AgentItem) -> AgentTrajectory:
        await solve(item, question(item.record))
        return ctx.trajectory(item)

    return await asyncio.gather(*(one(item) for item in batch.iter_samples()))
