"""Starting positions of duels: an open field, a wall with gaps, and traps around the pickups."""

from __future__ import annotations

import random
from typing import Any

from duelgrid import SIZE, Duel, Fighter, Tile

SCENARIOS = ("open", "wall", "traps")


def draw_record(rng: random.Random) -> dict[str, Any]:
    """Return a record with the starting state and the seed of the scripted player."""
    scenario = rng.choice(SCENARIOS)
    return {"scenario": scenario, "seed": (seed := rng.randrange(2**31)), "state": draw_duel(scenario, seed).to_json()}


def draw_duel(scenario: str, seed: int) -> Duel:
    """Return the starting position of a duel. Equal seeds give equal positions.

    Args:
        scenario: one of :data:`SCENARIOS`.
        seed: seed of the random positions of players, walls, traps and pickups.
    """
    rng = random.Random(f"{scenario}:{seed}")
    gaps = rng.sample(range(SIZE), 3)
    walls = {(SIZE // 2, y) for y in range(SIZE) if y not in gaps} if scenario == "wall" else set()
    free = [(x, y) for x in range(SIZE) for y in range(SIZE) if (x, y) not in walls]
    agent = rng.choice([tile for tile in free if tile[0] < 3])
    user = rng.choice([tile for tile in free if tile[0] >= SIZE - 3])
    rest = [tile for tile in free if tile not in (agent, user)]
    pickups: dict[Tile, str] = dict(zip(rng.sample(rest, 4), ("health", "energy") * 2, strict=True))
    places = [tile for tile in rest if tile not in pickups]
    traps = set(rng.sample(places, 12 if scenario == "traps" else 3))
    return Duel({"U": Fighter(*user), "A": Fighter(*agent)}, walls, traps, pickups)
