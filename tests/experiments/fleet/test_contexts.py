"""Multi-turn episodes reuse the KV cache of their earlier turns."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from areno.rollouts.engine_client import EPISODE, EngineClient, Episode, ModelRequest
from tests.experiments.fleet.support import wait_until
from tests.experiments.stage import Generation

PROMPT = list(range(2, 35))  # 33 tokens
USER_TURN = [5, 6]


async def converse(client: EngineClient, task: int, turns: int) -> list[int]:
    """All tokens of one conversation whose answers have 8 tokens."""
    EPISODE.set(Episode(task))
    tokens = list(PROMPT)
    for _ in range(turns):
        answer = await client.agenerate(ModelRequest(list(tokens), Generation(max_new_tokens=8)))
        tokens += [*answer.output_tokens, *USER_TURN]
    return tokens


def reused(fleet: Any) -> int:
    return fleet.load().reused_total


def test_later_turns_reuse_the_kv_cache_also_after_a_replica_restart(open_fleet, trainer):
    fleet = open_fleet()
    client = EngineClient(fleet, seed=3)
    asyncio.run(converse(client, 0, 1))
    asyncio.run(converse(client, 1, 1))
    assert reused(fleet) == 0  # single-turn answers cache nothing

    tokens = asyncio.run(converse(client, 2, 3))
    # Contexts are cached from the second turn on: its 43 + 8 tokens fill three blocks of 16, with which the third begins.
    assert reused(fleet) == 48
    assert tokens == asyncio.run(converse(EngineClient(trainer, seed=3), 2, 3))  # reuse changes no token

    os.kill(fleet.health().replicas[0].worker.pids[0], signal.SIGKILL)
    wait_until(lambda: fleet.health().restarts == 1 and fleet.health().replicas[0].worker.state == "ready")
    assert reused(fleet) == 0
    asyncio.run(converse(client, 4, 2))
    assert reused(fleet) == 32  # 33 + 8 tokens fill two blocks
