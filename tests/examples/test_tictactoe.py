"""Tic-tac-toe: rules and perfect play against brute force, scores by hand, and the two environments."""

from __future__ import annotations

import itertools
import random
import sys
from functools import cache

import pytest

from areno.api.agentic.demonstrations import calls, says
from tests.examples import scripted

sys.path.insert(0, str(scripted.FOLDER / "tictactoe"))

import tictactoe as game


@cache
def outcome(board: tuple[str, ...], player: str) -> int:
    """Value for X of a board with `player` to move: a second implementation, as plain minimax."""
    rows = [board[0:3], board[3:6], board[6:9], board[0::3], board[1::3], board[2::3], board[0::4], board[2:7:2]]
    for mark, value in (("X", 1), ("O", -1)):
        if (mark,) * 3 in rows:
            return value
    free = [place for place in range(9) if board[place] == "."]
    if not free:
        return 0
    other = "O" if player == "X" else "X"
    values = [outcome((*board[:place], player, *board[place + 1 :]), other) for place in free]
    return max(values) if player == "X" else min(values)


def every_board() -> list[str]:
    """All reachable boards on which the game is not over."""
    seen, waiting = set(), ["." * 9]
    while waiting:
        board = waiting.pop()
        if board not in seen and not game.is_over(board):
            seen.add(board)
            waiting += [game.play(board, square) for square in game.empty_squares(board)]
    return sorted(seen)


def test_the_number_of_boards_is_the_known_one():
    assert len(every_board()) == 4520  # 5478 boards, of which 958 are final


def test_best_squares_equal_those_of_brute_force():
    for board in every_board():
        player = game.to_move(board)
        sign, other = (1, "O") if player == "X" else (-1, "X")
        values = {
            square: sign * outcome(tuple(game.play(board, square)), other) for square in game.empty_squares(board)
        }
        assert game.best_squares(board) == [square for square, v in values.items() if v == max(values.values())], board


@pytest.mark.parametrize(
    ("board", "square", "score"),
    [
        ("XX.OO....", 3, 1.0),  # wins
        ("XX.OO....", 6, 0.0),  # legal: blocks O, but misses the win
        ("XX.OO....", 1, -1.0),  # taken
        ("XX.OO....", None, -1.0),
        ("X...O....", 9, 0.8),
        ("XX..O....", 3, 0.8),  # O must block; no other move draws
        ("XX..O....", 7, 0.0),
    ],
)
def test_moves_are_scored_as_documented(board, square, score):
    assert game.score_move(board, square) == score


def record(board, whole_game=False, seed=0):
    return {"board": board, "seed": seed, "whole_game": whole_game}


def reward(row, *answers, text=False):
    return scripted.replayed(scripted.reward("tictactoe", "text_reward_fn" if text else "reward_fn"), row, answers)


def choose(*squares):
    return calls(*(("choose_square", {"square": square}) for square in squares))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (choose(3), 1.0),
        (choose(6), 0.0),
        (choose(1), -1.0),
        (choose(3, 6), -1.0),
        (choose("3"), -1.0),
        (choose(0), -1.0),
        (calls(("choose_circle", {"square": 3})), -1.0),
        (says("3"), -1.0),
    ],
)
def test_a_call_earns_the_score_of_its_move(answer, expected):
    assert reward(record("XX.OO...."), answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<move>3</move>", 1.0),
        ("I take <move> 3 </move>.", 1.0),
        ("<think>or <move>6</move>?</think><move>3</move>", 1.0),
        ("<move>3</move><move>3</move>", -1.0),
        ("<move>13</move>", -1.0),
        ("<think><move>3</move>", -1.0),
        ("3", -1.0),
        ("", -1.0),
    ],
)
def test_a_written_move_earns_the_same_score(text, expected):
    assert reward(record("XX.OO...."), says(text), text=True) == expected


def test_only_the_first_move_counts():
    assert reward(record("XX.OO...."), choose(6), choose(3)) == 0.0


def test_whole_games_are_scored_by_their_result():
    won = record("XX.OO....", whole_game=True)
    assert reward(won, choose(3)) == 1.0
    assert reward(record("XOXXOOO.X", whole_game=True), choose(8)) == 0.8  # a draw on the last square
    assert reward(record("XX.OO....", whole_game=True), choose(1)) == -1.0
    # After one move there is no result yet, and giving up earns 0.
    assert reward(record("." * 9, whole_game=True), choose(5)) == 0.0


def test_perfect_play_wins_or_draws_most_whole_games():
    course = scripted.course("tictactoe", "WHOLE_GAMES")
    results = []
    for seed in range(60):
        row, messages, _ = scripted.played(course, seed)
        assert row["whole_game"]
        results.append(scripted.replayed(scripted.reward("tictactoe"), row, messages))
        assert scripted.played(course, seed)[1] == messages, "the opponent depends only on the record"
    # On a board that random moves have spoiled, even perfect play may lose.
    assert {1.0, 0.8} <= set(results)
    assert sum(results) / len(results) > 0.7


def test_the_opponent_makes_good_and_bad_moves():
    replies = set()
    for seed in range(30):
        task = game.TicTacToe()
        task.reset(record("X...O....", whole_game=True, seed=seed))
        task.choose_square(2)  # threatens 3
        replies.add(next(i + 1 for i, mark in enumerate(task.board) if mark == "O" and i != 4))
    assert 3 in replies
    assert len(replies) > 2


def test_held_out_boards_are_in_no_training_file():
    def boards(held_out, whole_games):
        draws = (
            game.draw_record(random.Random(seed), held_out=held_out, whole_games=whole_games) for seed in range(1500)
        )
        return {row["board"] for row in draws}

    for whole_games in (False, True):
        assert not boards(True, whole_games) & boards(False, whole_games)


def test_boards_have_the_documented_number_of_moves_and_random_play_the_documented_reward():
    rows = [game.draw_record(random.Random(seed)) for seed in range(3000)]
    moves = [9 - row["board"].count(".") for row in rows]
    assert set(moves) == {5, 6, 7, 8}
    any_square = [game.score_move(row["board"], square) for row in rows for square in range(1, 10)]
    assert -0.56 < sum(any_square) / len(any_square) < -0.46
    free = [
        sum(game.score_move(row["board"], square) for square in game.empty_squares(row["board"]))
        / row["board"].count(".")
        for row in rows
    ]
    assert 0.53 < sum(free) / len(free) < 0.61


def test_the_prompt_shows_the_board():
    assert game.TicTacToe().reset(record("XX.OO....")) == (
        "You are X.\n X1 X2 3\n O4 O5 6\n 7 8 9\nCall choose_square with a free square."
    )
    assert "<move>" in game.TicTacToeInText().reset(record("XX.OO...."))


def test_every_line_wins():
    for line in itertools.combinations(range(9), 3):
        board = "".join("X" if place in line else "." for place in range(9))
        squares = {(place // 3, place % 3) for place in line}
        straight = len({r for r, _ in squares}) == 1 or len({c for _, c in squares}) == 1
        diagonal = all(r == c for r, c in squares) or all(r + c == 2 for r, c in squares)
        assert (game.winner(board) == "X") == (straight or diagonal)
