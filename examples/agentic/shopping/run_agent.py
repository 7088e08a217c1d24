"""Agent with turns for the four steps, and two more turns to correct mistakes."""

from __future__ import annotations

from shopping import Shopping

from areno.api.agentic.environment import run_environment

run_agent = run_environment(Shopping, max_turns=6)
