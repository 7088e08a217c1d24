"""Environment in which a model plays DuelGrid as ``A``, with the tool ``choose_action``, against the scripted player."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from duelgrid import Action, Duel, TurnResult, from_json, scripted_turn

from areno.api.agentic.environment import Answer, Environment

DEALT, TAKEN, CLOSER, PICKUP, WAITED, ILLEGAL, UNSPENT = 0.10, -0.08, 0.01, 0.10, -0.02, -0.30, -0.05
WON, LOST = 1.0, -1.0
RULES = (
    "You are A in a duel on an 11 by 11 grid, U is your enemy, x grows to the right and y down. A turn has 3 energy. "
    "MOVE (1, with direction), ATTACK (1, 3 damage to a neighbor), RANGED_ATTACK (2, 2 damage in line up to 4 tiles), "
    "SHIELD (1), PICKUP (0, on your tile), WAIT (0). Call choose_action with the actions of your turn."
)


def text_of(duel: Duel) -> str:
    """Return the state as text for a model."""
    a, u = duel.fighters["A"], duel.fighters["U"]

    def listed(tiles: Sequence[tuple[int, int]]) -> str:
        return " ".join(f"({x}, {y})" for x, y in sorted(tiles)) or "none"

    health = [tile for tile, kind in duel.pickups.items() if kind == "health"]
    energy = [tile for tile, kind in duel.pickups.items() if kind == "energy"]
    return (
        f"A at ({a.x}, {a.y}), health {a.health}, saved energy {a.energy}\n"
        f"U at ({u.x}, {u.y}), health {u.health}{', shield up' if u.shield else ''}\n"
        f"U is {_way_to(u.x - a.x, 'right', 'left')}, {_way_to(u.y - a.y, 'down', 'up')}\n"
        f"health: {listed(health)}\nenergy: {listed(energy)}\ntraps: {listed(list(duel.traps))}\n"
        f"walls: {listed(list(duel.walls))}"
    )


def turn_reward(mine: TurnResult, theirs: TurnResult | None) -> float:
    """Return the reward of one turn of the model and the opponent's next turn.

    The reward is the sum of 0.10 per point of damage dealt, -0.08 per point taken (including traps), 0.01 per tile closer to
    the enemy and -0.01 per tile farther away, 0.10 for a pickup, -0.02 for a WAIT, -0.30 for an illegal action, and -0.05 per
    unused point of the turn's 3 energy.
    """
    suffered = mine.taken + (theirs.dealt if theirs else 0)
    return (
        DEALT * mine.dealt
        + TAKEN * suffered
        + CLOSER * mine.closer
        + PICKUP * mine.pickups
        + WAITED * mine.waits
        + ILLEGAL * mine.illegal
        + UNSPENT * min(mine.unspent, 3)
    )


class DuelGrid(Environment):
    """A duel until one player has won, with at most 12 turns for each player.

    The reward is the sum of :func:`turn_reward` over the model's turns, plus 1 if the model wins the duel, or minus 1 if it
    loses. An answer without a call counts as a turn with an illegal action.
    """

    def reset(self, record: Mapping[str, Any]) -> str:
        """Set up the duel."""
        self.duel = from_json(record["state"])
        self.seed, self.turns, self._total = record["seed"], 0, 0.0
        return f"{RULES}\n{text_of(self.duel)}"

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the only tool."""
        return [self.choose_action]

    def choose_action(self, actions: Annotated[list[Action], "in order"]) -> str:
        """Play your turn."""
        if self.duel.winner or self.duel.to_move != "A":
            return "it is not your turn"
        return self._play(actions)

    def step(self, answer: Answer) -> str | None:
        """Count an answer without a valid tool call as an illegal action; return None if the duel is over."""
        seen = ""
        if not answer.results or answer.results[0].failed:
            seen = self._play([{"action": "none"}])
        if self.duel.winner:
            return None
        return seen

    def reward(self) -> float:
        """Return the reward; see the class."""
        return self._total + {"A": WON, "U": LOST}.get(self.duel.winner or "", 0.0)

    def _play(self, actions: Sequence[Mapping[str, Any]]) -> str:
        """Play the model's turn and the script's; return the text of the resulting state."""
        mine = self.duel.play_turn(actions)
        theirs = None
        if self.duel.winner is None:
            rng = random.Random(f"{self.seed}:{self.turns}")
            theirs = self.duel.play_turn(scripted_turn(self.duel, rng))
        self.turns += 1
        self._total += turn_reward(mine, theirs)
        events = [*mine.events, *(theirs.events if theirs else [])]
        return "; ".join(events) + f"\n{text_of(self.duel)}"


def _way_to(offset: int, positive: str, negative: str) -> str:
    return f"{abs(offset)} {positive if offset >= 0 else negative}"
