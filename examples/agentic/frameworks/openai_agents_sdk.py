"""An unmodified agent of the OpenAI Agents SDK (``pip install openai-agents``).

The SDK uses the Responses API or chat completions, and areno serves both APIs. areno records the turns of a task by the
task's own key, so only the agent's client needs to be configured.
"""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from arithmetic import MAX_TURNS, calculate, each_item
from openai import AsyncOpenAI

from areno.api.agentic import AgentBatch, AgentItem, AgentTrajectory


async def run_agent(ctx: Any, batch: AgentBatch) -> list[AgentTrajectory]:
    """Run the SDK's loop once for each task."""

    async def solve(item: AgentItem, prompt: str) -> None:
        async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.get_api_key(item)) as client:
            agent = Agent(
                name="calculator",
                tools=[function_tool(calculate)],
                model=OpenAIResponsesModel(model="policy", openai_client=client),
            )
            # Traces would be sent to OpenAI.
            await Runner.run(agent, prompt, max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True))

    return await each_item(ctx, batch, solve)
