"""What the move, or the game, is worth: 1.0 win, 0.8 best, 0.0 merely legal or lost, -1.0 illegal or none."""

from __future__ import annotations

from tictactoe import TicTacToe, TicTacToeInText

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(TicTacToe)
text_reward_fn = environment_reward(TicTacToeInText)
