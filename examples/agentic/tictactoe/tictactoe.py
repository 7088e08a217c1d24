"""Tic-tac-toe: the rules, perfect play, and two environments in which a model plays.

A board is a text of nine characters, ``X``, ``O`` or ``.``, row by row. Squares have the numbers 1 to 9 in the same order.
X begins.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from areno.api.agentic.environment import Answer, Environment

WIN, BEST, LEGAL, ILLEGAL = 1.0, 0.8, 0.0, -1.0
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
Square = Literal[1, 2, 3, 4, 5, 6, 7, 8, 9]
_MOVE = re.compile(r"<move>\s*([1-9])\s*</move>")


def to_move(board: str) -> str:
    """Return whose turn it is."""
    return "X" if board.count("X") == board.count("O") else "O"


def empty_squares(board: str) -> list[int]:
    """Return the numbers of the free squares."""
    return [square for square in range(1, 10) if board[square - 1] == "."]


def play(board: str, square: int) -> str:
    """Return the board after the player to move has taken a free square."""
    return board[: square - 1] + to_move(board) + board[square:]


def winner(board: str) -> str | None:
    """Return the player with three in a line, or None."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


def is_over(board: str) -> bool:
    """Return whether a player has won or the board is full."""
    return winner(board) is not None or "." not in board


@cache
def value(board: str) -> int:
    """Return the result of perfect play for the player to move: 1 win, 0 draw, -1 loss."""
    if winner(board):
        return -1
    return max((-value(play(board, square)) for square in empty_squares(board)), default=0)


def best_squares(board: str) -> list[int]:
    """Return the moves of perfect play, which keep the value of the board."""
    return [square for square in empty_squares(board) if -value(play(board, square)) == value(board)]


def score_move(board: str, square: int | None) -> float:
    """Reward of one move.

    Args:
        board: the board before the move.
        square: number of the square; None if the model chose no square.

    Returns:
        1.0 for a move that wins at once, 0.8 for another move of perfect play, 0.0 for any other free square, -1.0 for a
        taken square or no square.
    """
    if square not in empty_squares(board):
        return ILLEGAL
    if winner(play(board, square)):
        return WIN
    return BEST if square in best_squares(board) else LEGAL


def score_game(board: str, player: str) -> float:
    """Reward of a finished game: 1.0 for a win, 0.8 for a draw (the best result against a perfect opponent), 0.0 for a loss."""
    won_by = winner(board)
    return BEST if won_by is None else WIN if won_by == player else LEGAL


def draw_record(rng: random.Random, *, whole_games: bool = False, held_out: bool = False) -> dict[str, Any]:
    """Return a board from a game between two random players, stopped before its end.

    Args:
        rng: source of random numbers.
        whole_games: stop after 0 to 3 moves, for games that are played to the end, instead of after 5 to 8, for a single move.
        held_out: return a held-out board; a fifth of all boards is excluded from training.
    """
    while True:
        board = "." * 9
        for _ in range(rng.randint(0, 3) if whole_games else rng.randint(5, 8)):
            if is_over(board):
                break
            board = play(board, rng.choice(empty_squares(board)))
        if not is_over(board) and (zlib.crc32(board.encode()) % 5 == 0) == held_out:
            return {"board": board, "seed": rng.randrange(2**31), "whole_game": whole_games}


def text_of(board: str) -> str:
    """Return the board as text in three rows. Each square is its number, preceded by the mark of the player who has taken
    it.
    """
    cells = [f"{mark.strip('.')}{index + 1}" for index, mark in enumerate(board)]
    return "\n".join(" " + " ".join(cells[row : row + 3]) for row in (0, 3, 6))


class TicTacToe(Environment):
    """Environment in which a model continues a game from a board, with the tool ``choose_square``.

    The record has ``board``, ``seed`` and ``whole_game``. Without ``whole_game`` the model makes one move, and
    :func:`score_move` scores this move. With ``whole_game`` an opponent answers each move with a perfect or a random move,
    chosen with equal probability by ``seed`` and the board. :func:`score_game` scores the finished game. An illegal move ends
    the episode with -1.
    """

    ask = "Call choose_square with a free square."

    def reset(self, record: Mapping[str, Any]) -> str:
        """Set up the board."""
        self.board: str = record["board"]
        self.player = to_move(self.board)
        self.seed, self._whole_game = record["seed"], record["whole_game"]
        self._reward = ILLEGAL  # until a move is made
        return f"You are {self.player}.\n{text_of(self.board)}\n{self.ask}"

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the only tool."""
        return [self.choose_square]

    def choose_square(self, square: Annotated[Square, "number of the square"]) -> str:
        """Put your mark on a free square."""
        return self._move(square)

    def step(self, answer: Answer) -> str | None:
        """Return None, which ends the episode, if the game is over or the answer is not exactly one legal move."""
        moved = [result for result in answer.results if not result.failed]
        if len(moved) != 1 or len(answer.results) != 1:
            self._reward = ILLEGAL
            return None
        return "" if self._goes_on() else None

    def reward(self) -> float:
        """Return the reward; see :func:`score_move` and :func:`score_game`."""
        return self._reward

    def _goes_on(self) -> bool:
        return self._whole_game and self._reward != ILLEGAL and not is_over(self.board)

    def _move(self, square: int) -> str:
        """Make the model's move and the opponent's reply; return the text of the resulting board."""
        self._reward = score_move(self.board, square)
        if self._reward == ILLEGAL:
            return f"square {square} is taken"
        self.board = play(self.board, square)
        if self._whole_game and not is_over(self.board):
            self.board = play(self.board, self._opponents_square())
        if self._whole_game:
            # An unfinished game has no reward yet.
            self._reward = score_game(self.board, self.player) if is_over(self.board) else LEGAL
        return text_of(self.board)

    def _opponents_square(self) -> int:
        rng = random.Random(f"{self.seed}:{self.board}")
        return rng.choice(best_squares(self.board) if rng.random() < 0.5 else empty_squares(self.board))


class TicTacToeInText(TicTacToe):
    """The same environment without tools. The model writes ``<move>5</move>``, optionally after its reasoning."""

    ask = "Answer with <move>number of a free square</move>."

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return no tools."""
        return []

    def step(self, answer: Answer) -> str | None:
        """Parse and make the move of the answer."""
        squares = _MOVE.findall(answer.text)
        if len(squares) != 1:
            self._reward = ILLEGAL
            return None
        seen = self._move(int(squares[0]))
        return seen if self._goes_on() else None
