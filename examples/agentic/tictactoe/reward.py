"""Reward of the move or the game; see ``score_move`` and ``score_game`` in ``tictactoe.py``. An illegal move scores -1.0."""

from __future__ import annotations

from tictactoe import TicTacToe, TicTacToeInText

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(TicTacToe)
text_reward_fn = environment_reward(TicTacToeInText)
