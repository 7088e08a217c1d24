"""Experts whose answers prepare a random model for reinforcement learning; see ``../warm_start.py``.

`EXPERT`, `TEXT` and `WHOLE_GAMES` play perfectly. `READER` only lists the free and the winning squares, and calls the tool
with a random square. Playing well is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from tictactoe import TicTacToe, TicTacToeInText, best_squares, draw_record, empty_squares, play, winner

from areno.api.agentic.demonstrations import Course, Message, calls, says
from areno.api.agentic.environment import Answer


def best_square(game: TicTacToe) -> int:
    """Return one of the best squares; the choice depends only on the game."""
    return random.Random(f"{game.board}:{game.seed}").choice(best_squares(game.board))


def call_best(game: TicTacToe) -> Message:
    """Return the move as a tool call."""
    return calls(("choose_square", {"square": best_square(game)}))


def say_best(game: TicTacToe) -> Message:
    """Return the move as text."""
    return says(f"<move>{best_square(game)}</move>")


class Lesson(TicTacToe):
    """Asks for the free and the winning squares on 70 % of the boards, and for a move on all other boards."""

    def reset(self, record: Mapping[str, Any]) -> str:
        """Set up the board."""
        seen = super().reset(record)
        self.reads = random.Random(self.seed).random() < 0.7
        return seen.replace(self.ask, "Which squares are free, and which of them win at once?") if self.reads else seen

    def step(self, answer: Answer) -> str | None:
        """Return None, which ends the episode, if the answer lists squares."""
        return None if self.reads else super().step(answer)


def read_or_call(game: Lesson) -> Message:
    """Return the free and the winning squares as text, or a tool call with any of the nine squares."""
    if game.reads:
        free = empty_squares(game.board)
        wins = [square for square in free if winner(play(game.board, square))]
        return says("Free: " + " ".join(map(str, free)) + "\nWin: " + " ".join(map(str, wins)))
    return calls(("choose_square", {"square": random.Random(f"{game.board}:{game.seed}").randint(1, 9)}))


EXPERT = Course(TicTacToe, draw_record, call_best)
TEXT = Course(TicTacToeInText, draw_record, say_best)
WHOLE_GAMES = Course(TicTacToe, partial(draw_record, whole_games=True), call_best)
READER = Course(Lesson, draw_record, read_or_call)
