"""An unmodified LangChain agent (``pip install langchain langchain-openai``)."""

from __future__ import annotations

from typing import Any

from arithmetic import MAX_TURNS, calculate, each_item
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from areno.api.agentic import AgentBatch, AgentItem, AgentTrajectory


async def run_agent(ctx: Any, batch: AgentBatch) -> list[AgentTrajectory]:
    """Run one graph for each task."""

    async def solve(item: AgentItem, prompt: str) -> None:
        model = ChatOpenAI(model="policy", base_url=ctx.get_base_url(), api_key=ctx.get_api_key(item), max_retries=0)
        agent = create_agent(model, tools=[calculate])
        # A turn of the model and its tool calls are two steps of the graph.
        await agent.ainvoke({"messages": [("user", prompt)]}, {"recursion_limit": 2 * MAX_TURNS + 1})

    return await each_item(ctx, batch, solve)
