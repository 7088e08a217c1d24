"""Agents: ``run_agent`` moves with a tool, and ``run_text_agent`` writes its move. A game has at most five moves per player."""

from __future__ import annotations

from tictactoe import TicTacToe, TicTacToeInText

from areno.api.agentic.environment import run_environment

run_agent = run_environment(TicTacToe, max_turns=5)
run_text_agent = run_environment(TicTacToeInText, max_turns=5)
