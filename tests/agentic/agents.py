"""Agents for tests of whole runs; each is written to a file that ``--agent-fn`` can name."""

from __future__ import annotations

from pathlib import Path

HEAD = """
import asyncio

import openai

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


async def talk(ctx, item, turns, words="again", reward=None, max_tokens=5):
    async with openai.AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
        messages, found = [{"role": "user", "content": item.prompt}], []
        for number in range(turns):
            response = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
            turn = AgentTrajectoryTurn(item=item, messages=list(messages), response=response)
            turn.reward = None if reward is None else reward(number)
            found.append(turn)
            messages += [response.choices[0].message, {"role": "user", "content": words}]
        return AgentTrajectory(found)
"""
THREE_TURNS = """

async def run_agent(ctx, batch):
    return await asyncio.gather(*(talk(ctx, item, 3) for item in batch.iter_samples()))
"""


def write_agent(folder: Path, body: str, name: str = "agent.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(HEAD + body)
    return path
