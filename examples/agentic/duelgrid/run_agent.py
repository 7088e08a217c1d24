"""Agent that calls ``choose_action`` once per turn. A duel has at most 12 turns for each player."""

from __future__ import annotations

from duel_environment import DuelGrid

from areno.api.agentic.environment import run_environment

run_agent = run_environment(DuelGrid, max_turns=12)
