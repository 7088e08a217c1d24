"""The agent: one operation per turn, then the answer."""

from __future__ import annotations

from calculator import Calculator

from areno.api.agentic.environment import run_environment

run_agent = run_environment(Calculator, max_turns=8)
