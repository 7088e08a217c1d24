"""Agent that does one operation per turn, and then answers."""

from __future__ import annotations

from calculator import Calculator

from areno.api.agentic.environment import run_environment

run_agent = run_environment(Calculator, max_turns=8)
