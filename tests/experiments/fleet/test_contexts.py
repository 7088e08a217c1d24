"""Episodes of several turns: what earlier turns have computed is not computed again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from areno.rollouts.engine_client import EPISODE, EngineClient, Episode, ModelRequest
from tests.experiments.fleet.support import wait_until
from tests.experiments.stage import Generation

PROMPT = list(range(2, 35))  # 33 tokens
GIVEN = [5, 6]


async def converse(client: EngineClient, task: int, turns: int) -> list[int]:
    """One conversation of answers of 8 tokens; all of its tokens."""
    EPISODE.set(Episode(task))
    tokens = list(PROMPT)
    for _ in range(turns):
        answer = await client.agenerate(ModelRequest(list(tokens), Generation(max_new_tokens=8)))
        tokens += [*answer.output_tokens, *GIVEN]
    return tokens


def reused(fleet: Any) -> int:
    return fleet.load().reused_total


def test_turns_reuse_what_was_computed_also_on_a_replica_that_has_come_anew(open_fleet, trainer):
    fleet = open_fleet()
    client = EngineClient(fleet, seed=3)
    asyncio.run(converse(client, 0, 1))
    asyncio.run(converse(client, 1, 1))
    assert reused(fleet) == 0  # answers to single prompts keep nothing

    said = asyncio.run(converse(client, 2, 3))
    # From the second turn on contexts are kept: its 43 + 8 tokens have three whole blocks of 16, which begin the third.
    assert reused(fleet) == 48
    assert said == asyncio.run(converse(EngineClient(trainer, seed=3), 2, 3))  # nothing is said differently

    os.kill(fleet.health().replicas[0].worker.pids[0], signal.SIGKILL)
    wait_until(lambda: fleet.health().restarts == 1 and fleet.health().replicas[0].worker.state == "ready")
    assert reused(fleet) == 0
    asyncio.run(converse(client, 4, 2))
    assert reused(fleet) == 32  # 33 + 8 tokens have two whole blocks
