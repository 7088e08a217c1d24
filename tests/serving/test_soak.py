"""Many clients at once, some of which disconnect midway: the others are not affected, and nothing is left in the engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter

import httpx
import pytest

from tests.serving.running import running


async def client(url, number, last, until, counts):
    """Stream ``last`` answers, or as many as fit into the time, and abandon a third of them. The others must be complete.

    The first answer of each client is long and not abandoned, so that all clients together fill a short queue.
    """
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for sent in itertools.count():
            if sent == last or time.monotonic() > until:
                return
            leave = draw.random() < 0.33 and sent > 0
            wanted = draw.randint(4, 40) if sent else 80
            body = {"prompt": f"What is {number} plus", "max_tokens": wanted, "ignore_eos": True, "stream": True}
            body |= {"stream_options": {"include_usage": True}, "n": draw.choice([1, 1, 2])}
            try:
                counts[await asyncio.wait_for(one(http, body), draw.uniform(0.005, 0.4) if leave else None)] += 1
            except TimeoutError:
                counts["left"] += 1


async def one(http, body):
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 429:
            await answer.aread()
            await asyncio.sleep(0.1)
            return "refused"
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == body["max_tokens"] * body["n"]
    return "complete"


def soak(server, clients, *, last=None, seconds=math.inf):
    async def together():
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(server.url, number, last, until, counts) for number in range(clients)))

    counts = Counter()
    asyncio.run(together())
    server.wait_idle(timeout=10)
    assert server.metric("areno_kv_tokens_used") == 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
    return counts


def test_forty_clients_with_random_disconnects(server):
    counts = soak(server, 40, last=8)
    assert counts["complete"] > 10
    assert counts["left"] > 10
    assert counts["refused"] > 0  # this server runs 8 samples and queues 24


@pytest.mark.long
def test_two_hundred_clients_for_two_minutes(sharp_checkpoint):
    with running(sharp_checkpoint, "--max-running-prompts", 32, "--kv-cache-tokens", 60000) as server:
        counts = soak(server, 200, seconds=120)
        assert counts["complete"] > 100
        assert counts["left"] > 100
