"""The agent: a call of ``choose_action`` for each turn. A duel has 12 turns each at most."""

from __future__ import annotations

from duel_environment import DuelGrid

from areno.api.agentic.environment import run_environment

run_agent = run_environment(DuelGrid, max_turns=12)
