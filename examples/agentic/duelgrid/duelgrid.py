"""Rules and scripted player of DuelGrid, a turn-based duel on 11 by 11 tiles.

``U`` is the user (in training a script), and ``A`` is the agent. A turn has 3 energy plus the remaining energy of pickups,
at most 6 in total. Each action costs energy::

    MOVE           1   one tile up, down, left or right, not onto a wall or the other player; a trap costs 2 health
    ATTACK         1   3 damage to a player on one of the four neighboring tiles
    RANGED_ATTACK  2   2 damage to a player in the same row or column, at most 4 tiles away, with no wall between
    SHIELD         1   every hit until the player's next turn does 2 less damage
    PICKUP         0   take what lies on the player's tile: health 3 (10 at most) or energy 2
    WAIT           0   end the turn

An illegal action ends the turn. A player without health has lost. After the last turn the player with more health has won.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

SIZE, MAX_HEALTH, TURN_ENERGY, ENERGY_CAP = 11, 10, 3, 6
COST = {"MOVE": 1, "ATTACK": 1, "RANGED_ATTACK": 2, "SHIELD": 1, "PICKUP": 0, "WAIT": 0}
DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
DAMAGE = {"ATTACK": 3, "RANGED_ATTACK": 2}
RANGE, SHIELDED, TRAP = 4, 2, 2
HEALTH_PICKUP, ENERGY_PICKUP = 3, 2

Tile = tuple[int, int]
Player = Literal["U", "A"]


class Action(TypedDict):
    """One action. Only MOVE has a direction."""

    action: Literal["MOVE", "ATTACK", "RANGED_ATTACK", "SHIELD", "PICKUP", "WAIT"]
    direction: NotRequired[Literal["up", "down", "left", "right"]]


class IllegalActionError(Exception):
    """The rules forbid an action; the message says why."""


@dataclass(slots=True)
class Fighter:
    """A player's column and row, health, energy, and whether the shield is up."""

    x: int
    y: int
    health: int = MAX_HEALTH
    energy: int = 0
    shield: bool = False

    @property
    def tile(self) -> Tile:
        """Position of the player."""
        return self.x, self.y


@dataclass(slots=True)
class TurnResult:
    """Result of a turn.

    Attributes:
        events: descriptions of what happened, in order.
        dealt: damage done to the other player.
        taken: damage that the player took from traps.
        pickups: number of pickups taken.
        waits: number of WAIT actions.
        illegal: whether the turn ended with an illegal action.
        unspent: energy that was not used.
        closer: number of tiles by which the distance to the other player decreased.
    """

    events: list[str] = field(default_factory=list)
    dealt: int = 0
    taken: int = 0
    pickups: int = 0
    waits: int = 0
    illegal: bool = False
    unspent: int = 0
    closer: int = 0


@dataclass(slots=True)
class Duel:
    """The state of a game.

    Attributes:
        fighters: the players by name.
        walls: tiles that block movement and shots.
        traps: tiles that cost health.
        pickups: ``health`` or ``energy`` by tile.
        turns_left: turns until the game ends.
        to_move: player whose turn it is.
    """

    fighters: dict[str, Fighter]
    walls: set[Tile]
    traps: set[Tile]
    pickups: dict[Tile, str]
    turns_left: int = 24
    to_move: Player = "A"

    @property
    def winner(self) -> str | None:
        """Result: ``U``, ``A`` or ``draw``; None while the game continues."""
        health = {name: fighter.health for name, fighter in self.fighters.items()}
        if min(health.values()) > 0 and self.turns_left > 0:
            return None
        return "draw" if health["U"] == health["A"] else max(health, key=lambda name: health[name])

    def distance(self) -> int:
        """Manhattan distance between the players, in tiles."""
        u, a = self.fighters["U"], self.fighters["A"]
        return abs(u.x - a.x) + abs(u.y - a.y)

    def play_turn(self, actions: Sequence[Mapping[str, Any]]) -> TurnResult:
        """Play the turn of the player to move.

        Args:
            actions: actions in order; actions after an illegal action are ignored.
        """
        me, result, before = self.fighters[self.to_move], TurnResult(), self.distance()
        me.energy, me.shield = min(TURN_ENERGY + me.energy, ENERGY_CAP), False
        for action in actions:
            if self.winner:
                break
            try:
                result.events.append(f"{self.to_move} {self._act(action, result)}")
            except IllegalActionError as error:
                result.illegal = True
                result.events.append(f"{self.to_move} illegal: {error}")
                break
            if action["action"] == "WAIT":
                break
        result.unspent, result.closer = me.energy, before - self.distance()
        # Only energy from a pickup is kept for the next turn.
        me.energy = max(0, me.energy - TURN_ENERGY)
        self.turns_left -= 1
        self.to_move = "A" if self.to_move == "U" else "U"
        return result

    def _act(self, action: Mapping[str, Any], result: TurnResult) -> str:
        me = self.fighters[self.to_move]
        kind = action.get("action")
        if not isinstance(kind, str) or kind not in COST:
            raise IllegalActionError(f"there is no action {kind!r}")
        if COST[kind] > me.energy:
            raise IllegalActionError(f"{kind} costs {COST[kind]} energy, and {me.energy} is left")
        text = {
            "MOVE": self._move,
            "ATTACK": self._hit,
            "RANGED_ATTACK": self._hit,
            "SHIELD": self._raise_shield,
            "PICKUP": self._pick_up,
            "WAIT": self._wait,
        }[kind](action, result)
        me.energy -= COST[kind]
        return text

    def _move(self, action: Mapping[str, Any], result: TurnResult) -> str:
        me, direction = self.fighters[self.to_move], action.get("direction")
        if not isinstance(direction, str) or direction not in DIRECTIONS:
            raise IllegalActionError("MOVE needs a direction: up, down, left or right")
        tile = self.neighbor(me.tile, direction)
        if not self.is_free(tile):
            raise IllegalActionError(f"MOVE {direction}: {tile} is off the grid, a wall or taken")
        me.x, me.y = tile
        if tile not in self.traps:
            return f"moves {direction}"
        me.health -= TRAP
        result.taken += TRAP
        return f"moves {direction} into a trap"

    def _hit(self, action: Mapping[str, Any], result: TurnResult) -> str:
        other = self.fighters["U" if self.to_move == "A" else "A"]
        kind = action["action"]
        if not (self.distance() == 1 if kind == "ATTACK" else self.in_range()):
            raise IllegalActionError(f"{kind}: the other player is out of reach")
        damage = max(0, DAMAGE[kind] - (SHIELDED if other.shield else 0))
        other.health -= damage
        result.dealt += damage
        return f"hits for {damage}"

    def _raise_shield(self, action: Mapping[str, Any], result: TurnResult) -> str:
        if self.fighters[self.to_move].shield:
            raise IllegalActionError("SHIELD: it is up already")
        self.fighters[self.to_move].shield = True
        return "raises the shield"

    def _pick_up(self, action: Mapping[str, Any], result: TurnResult) -> str:
        me = self.fighters[self.to_move]
        found = self.pickups.pop(me.tile, None)
        if found is None:
            raise IllegalActionError("PICKUP: nothing lies here")
        result.pickups += 1
        if found == "health":
            me.health = min(MAX_HEALTH, me.health + HEALTH_PICKUP)
        else:
            me.energy = min(ENERGY_CAP, me.energy + ENERGY_PICKUP)
        return f"takes {found}"

    def _wait(self, action: Mapping[str, Any], result: TurnResult) -> str:
        result.waits += 1
        return "waits"

    def neighbor(self, tile: Tile, direction: str) -> Tile:
        """Return the neighboring tile in a direction."""
        dx, dy = DIRECTIONS[direction]
        return tile[0] + dx, tile[1] + dy

    def is_free(self, tile: Tile) -> bool:
        """Return whether a player could step on a tile."""
        inside = 0 <= tile[0] < SIZE and 0 <= tile[1] < SIZE
        return inside and tile not in self.walls and all(tile != each.tile for each in self.fighters.values())

    def in_range(self) -> bool:
        """Return whether the players can shoot at each other."""
        u, a = self.fighters["U"], self.fighters["A"]
        if u.x != a.x and u.y != a.y:
            return False
        between = {
            (x, y) for x in range(min(u.x, a.x), max(u.x, a.x) + 1) for y in range(min(u.y, a.y), max(u.y, a.y) + 1)
        }
        return self.distance() <= RANGE and not between & self.walls

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object; see :func:`from_json`."""
        return {
            "fighters": {name: asdict(fighter) for name, fighter in self.fighters.items()},
            "walls": sorted(map(list, self.walls)),
            "traps": sorted(map(list, self.traps)),
            "pickups": [{"x": x, "y": y, "kind": kind} for (x, y), kind in sorted(self.pickups.items())],
            "turns_left": self.turns_left,
            "to_move": self.to_move,
            "winner": self.winner,
        }


def from_json(state: Mapping[str, Any]) -> Duel:
    """Return the game for a state from :meth:`Duel.to_json`."""
    return Duel(
        fighters={name: Fighter(**values) for name, values in state["fighters"].items()},
        walls={(x, y) for x, y in state["walls"]},
        traps={(x, y) for x, y in state["traps"]},
        pickups={(each["x"], each["y"]): each["kind"] for each in state["pickups"]},
        turns_left=state["turns_left"],
        to_move=state["to_move"],
    )


def scripted_turn(duel: Duel, rng: random.Random | None = None) -> list[Action]:
    """Return a sensible turn: pick up an item on the player's tile, attack the other player if in reach, or else walk
    towards the other player (with low health, towards a health pickup), around walls and traps.

    Args:
        duel: the game, which remains unchanged.
        rng: if given, one turn in four is a random step instead.
    """
    actions: list[Action] = []
    trial = copy.deepcopy(duel)
    me = trial.fighters[trial.to_move]
    me.energy, me.shield = min(TURN_ENERGY + me.energy, ENERGY_CAP), False
    if rng is not None and rng.random() < 0.25:
        free = [name for name in DIRECTIONS if trial.is_free(trial.neighbor(me.tile, name))]
        return [_step(rng.choice(free))] if free else [{"action": "WAIT"}]
    while trial.winner is None and (action := _next_action(trial, me)) is not None:
        trial._act(action, TurnResult())
        actions.append(action)
    return actions or [{"action": "WAIT"}]


def _next_action(duel: Duel, me: Fighter) -> Action | None:
    if me.tile in duel.pickups:
        return {"action": "PICKUP"}
    if duel.distance() == 1 and me.energy >= COST["ATTACK"]:
        return {"action": "ATTACK"}
    if me.energy >= COST["RANGED_ATTACK"] and duel.in_range():
        return {"action": "RANGED_ATTACK"}
    direction = _way(duel, me) if me.energy >= COST["MOVE"] else None
    if direction is not None:
        return _step(direction)
    return {"action": "SHIELD"} if me.energy >= COST["SHIELD"] and not me.shield else None


def _step(direction: str) -> Action:
    return {"action": "MOVE", "direction": direction}  # type: ignore[typeddict-item]


def _way(duel: Duel, me: Fighter) -> str | None:
    """Return the first step of a shortest path to the other player, or to a health pickup if health is low; None if there is no
    path.
    """
    other = next(each for each in duel.fighters.values() if each is not me)
    wanted = {tile for tile, kind in duel.pickups.items() if kind == "health"} if me.health <= 4 else set()
    goals = wanted or set(_around(duel, other.tile))
    waiting: deque[tuple[Tile, str | None]] = deque([(me.tile, None)])
    seen = {me.tile}
    while waiting:
        tile, first = waiting.popleft()
        if tile in goals:
            return first
        for direction in DIRECTIONS:
            following = duel.neighbor(tile, direction)
            if duel.is_free(following) and following not in seen and following not in duel.traps:
                seen.add(following)
                waiting.append((following, first or direction))
    return None


def _around(duel: Duel, tile: Tile) -> Iterator[Tile]:
    return (duel.neighbor(tile, direction) for direction in DIRECTIONS)
