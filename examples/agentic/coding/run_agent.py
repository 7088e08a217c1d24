"""Agent that reads, writes and tests until it answers without a tool call, or has used all turns of the task."""

from __future__ import annotations

from coding import Repair
from sandbox import working_method

from areno.api.agentic.environment import run_environment

working_method()  # fails at import if no sandbox works
run_agent = run_environment(Repair, max_turns=32)
