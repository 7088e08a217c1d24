"""The agent: reads, writes and tests until it says that it is done, or the turns of the task are used up."""

from __future__ import annotations

from coding import Repair
from sandbox import working_method

from areno.api.agentic.environment import run_environment

working_method()  # refuses at once where nothing can hold the tests
run_agent = run_environment(Repair, max_turns=32)
