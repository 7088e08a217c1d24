"""Reward of the move or the game: 1.0 for a win, 0.8 for another best move or a draw, 0.0 for any other legal move or a loss,
-1.0 for an illegal move or none.
"""

from __future__ import annotations

from tictactoe import TicTacToe, TicTacToeInText

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(TicTacToe)
text_reward_fn = environment_reward(TicTacToeInText)
