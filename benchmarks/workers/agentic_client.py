"""The agent program of ``agentic_load.py``: conversations through the official client. Prints one JSON line."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import openai


async def converse(client: openai.AsyncOpenAI, number: int, settings: dict[str, Any]) -> list[float]:
    """One conversation; returns the time of each answer."""
    messages: list[Any] = [{"role": "system", "content": "You add numbers, and explain every step at length."}]
    latencies = []
    for turn in range(settings["turns"]):
        messages.append({"role": "user", "content": f"What is {number} plus {17 * turn}?"})
        began = time.perf_counter()
        answer = await client.chat.completions.create(model="policy", messages=messages)
        latencies.append(time.perf_counter() - began)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return latencies


async def run(settings: dict[str, Any]) -> list[float]:
    """All conversations at once."""
    first = settings["first"]
    async with openai.AsyncOpenAI(
        base_url=settings["url"], api_key=settings["key"], max_retries=0, timeout=3600
    ) as client:
        lists = await asyncio.gather(*(converse(client, first + n, settings) for n in range(settings["conversations"])))
    return [latency for one in lists for latency in one]


def main() -> None:
    latencies = asyncio.run(run(json.loads(sys.argv[1])))
    print(json.dumps({"cpu_s": time.process_time(), "latencies_s": latencies}))


if __name__ == "__main__":
    main()
