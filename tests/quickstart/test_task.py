"""The toy task: a clean split, correct demonstrations, and a reward that cannot be gamed."""

from __future__ import annotations

import json
import re

import pytest

from areno.config.hooks import REWARD_HOOK, load_hook
from areno.quickstart.task import (
    HIGH,
    LOW,
    REWARD_FILE,
    WORDINGS,
    Problem,
    draw_problems,
    is_right,
    problem_count,
    worked_answer,
    write_rows,
)
from areno.types import RewardRecord

WORDING = next(iter(WORDINGS))
STEP = re.compile(r"(\d)\+(\d)(?:\+(\d))?=(\d+)(?: carry (\d))?")


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD_FILE)
    return load_hook(str(path), REWARD_HOOK)


def score(reward, problem, completion):
    return reward(RewardRecord(completion=completion, answer=[str(problem.a + problem.b)]))


def test_there_are_ten_thousand_distinct_problems_and_a_twentieth_is_held_out():
    sums = {(a, b) for a in range(LOW, HIGH + 1) for b in range(LOW, HIGH + 1)}
    assert problem_count() == len(sums) >= 10_000
    held_out = sum(Problem(a, b, WORDING).held_out for a, b in sums)
    assert held_out >= 200
    assert held_out / len(sums) == pytest.approx(1 / 20, rel=0.05)


def test_the_split_is_a_stable_function_of_the_numbers_alone():
    assert [b for b in range(100, 180) if Problem(347, b, WORDING).held_out] == [109, 113, 126, 147, 157]
    for b in range(100, 180):
        assert len({Problem(347, b, wording).held_out for wording in WORDINGS}) == 1


def test_training_and_held_out_problems_are_disjoint():
    training = draw_problems(0, 3000, held_out=False)
    held_out = draw_problems(0, 400, held_out=True)
    assert not {(p.a, p.b) for p in training} & {(p.a, p.b) for p in held_out}
    assert len({(p.a, p.b) for p in training}) == 3000
    assert all(p.held_out for p in held_out)
    assert {p.wording for p in held_out} == set(WORDINGS)


def test_problems_are_a_function_of_the_seed():
    assert draw_problems(3, 50, held_out=False) == draw_problems(3, 50, held_out=False)
    assert draw_problems(3, 50, held_out=False) != draw_problems(4, 50, held_out=False)


def test_worked_answers_are_right_for_every_pair_of_digits_and_every_carry():
    # The leading 1 and 4 keep the sum at three digits; the two lower digits take all pairs, and so all carries.
    for low in range(100):
        for other in range(100):
            a, b = 100 + low, 400 + other
            text = worked_answer(a, b)
            assert text.endswith(f"Answer: {a + b}")
            ones, tens, hundreds = (STEP.fullmatch(part) for part in text.partition(". Answer")[0].split(", "))
            assert None not in (ones, tens, hundreds)
            x, y, _, digit, carry = ones.groups()
            assert (int(x), int(y)) == (a % 10, b % 10)
            assert int(x) + int(y) == 10 * int(carry) + int(digit)
            for step, place in ((tens, 10), (hundreds, 100)):
                x, y, before, digit, after = step.groups()
                assert (int(x), int(y), before) == (a // place % 10, b // place % 10, carry)
                assert int(x) + int(y) + int(before) == 10 * int(after or 0) + int(digit)
                carry = after
            assert "".join(m[4] for m in (hundreds, tens, ones)) == str(a + b)


def test_rows_have_the_answer_and_show_the_work_as_often_as_their_wording_says(tmp_path):
    problems = draw_problems(1, 3000, held_out=False)
    write_rows(tmp_path / "rows.jsonl", problems, 1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3000
    worked = dict.fromkeys(WORDINGS, 0)
    for problem, row in zip(problems, rows, strict=True):
        assert row["prompt"] == problem.question
        assert row["solutions"] == [str(problem.a + problem.b)]
        assert is_right(problem, row["response"])
        worked[problem.wording] += "carry" in row["response"]
    for wording, share in WORDINGS.items():
        asked = sum(problem.wording == wording for problem in problems)
        assert worked[wording] / asked == pytest.approx(share, abs=0.05)


PROBLEM = Problem(347, 182, WORDING)  # 529
RIGHT = [
    "Answer: 529",
    "  Answer: 529\n\n",
    "7+2=9 carry 0, 4+8+0=2 carry 1, 3+1+1=5. Answer: 529",
    "Answer: 111. No, wait. Answer: 529",
    "nonsense Answer: 529",
]
WRONG = [
    "",
    "529",
    "Answer: 52",
    "Answer: 5290",
    "Answer: 0529",
    "Answer: +529",
    "Answer: 529.0",
    "Answer: 529.",
    "Answer: 529 Answer: 530",
    "Answer: 529 or 530",
    "Answer:529",
    "answer: 529",
    "Answer: 5 29",
    "Answer: 529\nAnswer: ",
    "Answer: ٥٢٩",
    "Answer: ５２９",
    "Answer: 529\u200b",
    "Answer: 1 2 3 4 529",
    "Answer: " + "9" * 5000,
    worked_answer(347, 183),
]


@pytest.mark.parametrize("completion", RIGHT + WRONG, ids=range(len(RIGHT + WRONG)))
def test_the_reward_file_and_the_evaluation_agree_on_every_text(reward, completion):
    expected = completion in RIGHT
    assert is_right(PROBLEM, completion) is expected
    assert score(reward, PROBLEM, completion) == float(expected)


def test_every_sum_is_right_for_itself_and_wrong_for_its_neighbors(reward):
    for problem in draw_problems(5, 200, held_out=True):
        text = worked_answer(problem.a, problem.b)
        assert is_right(problem, text)
        assert score(reward, problem, text) == 1.0
        for near in (problem.a + 1, problem.a + 10, problem.a + 100):
            other = Problem(near, problem.b, problem.wording)
            assert not is_right(other, text)
            assert score(reward, other, text) == 0.0
