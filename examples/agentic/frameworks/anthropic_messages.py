"""An agent that uses Anthropic's Messages API (``pip install anthropic``), with its own loop."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam
from arithmetic import MAX_TURNS, calculate, each_item

from areno.api.agentic import AgentBatch, AgentItem, AgentTrajectory

ARGUMENTS = ("left", "operator", "right")
TOOL: ToolParam = {
    "name": "calculate",
    "description": "The result of one operation.",
    "input_schema": {
        "type": "object",
        "properties": {
            "left": {"type": "integer"},
            "operator": {"type": "string", "enum": ["+", "-", "*"]},
            "right": {"type": "integer"},
        },
        "required": list(ARGUMENTS),
    },
}


async def run_agent(ctx: Any, batch: AgentBatch) -> list[AgentTrajectory]:
    """Run one conversation for each task."""

    async def solve(item: AgentItem, prompt: str) -> None:
        # The client appends /v1 to its address.
        address = ctx.get_base_url().removesuffix("/v1")
        async with AsyncAnthropic(base_url=address, api_key=ctx.get_api_key(item)) as client:
            messages: list[MessageParam] = [{"role": "user", "content": prompt}]
            for _ in range(MAX_TURNS):
                answer = await client.messages.create(model="policy", max_tokens=64, tools=[TOOL], messages=messages)
                results: list[ToolResultBlockParam] = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": calculate(*map(block.input.get, ARGUMENTS)),
                    }
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                if not results:
                    return
                messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]

    return await each_item(ctx, batch, solve)
