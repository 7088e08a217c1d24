"""A perfect player, whose games make a random model ready for reinforcement learning; see ``../warm_start.py``."""

from __future__ import annotations

import random
from functools import partial

from tictactoe import TicTacToe, TicTacToeInText, best_squares, draw_record

from areno.api.agentic.demonstrations import Course, Message, calls, says


def best_square(game: TicTacToe) -> int:
    """One of the best squares; which one depends on the game alone."""
    return random.Random(f"{game.board}:{game.seed}").choice(best_squares(game.board))


def call_best(game: TicTacToe) -> Message:
    """The move as a call."""
    return calls(("choose_square", {"square": best_square(game)}))


def say_best(game: TicTacToe) -> Message:
    """The move in text."""
    return says(f"<move>{best_square(game)}</move>")


EXPERT = Course(TicTacToe, draw_record, call_best)
TEXT = Course(TicTacToeInText, draw_record, say_best)
WHOLE_GAMES = Course(TicTacToe, partial(draw_record, whole_games=True), call_best)
