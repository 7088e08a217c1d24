"""Expert that plays as the scripted player without random moves; see ``../warm_start.py``."""

from __future__ import annotations

from duel_environment import DuelGrid
from duelgrid import scripted_turn
from scenarios import draw_record

from areno.api.agentic.demonstrations import Course, Message, calls


def fight(duel: DuelGrid) -> Message:
    """Return the next turn as a tool call."""
    return calls(("choose_action", {"actions": scripted_turn(duel.duel)}))


EXPERT = Course(DuelGrid, draw_record, fight, max_turns=12)
