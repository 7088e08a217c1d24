"""The math-verify reward: symbolic equality, the last box, and no answer that stops a run."""

import subprocess
import sys
import threading
import time

import pytest

from areno.errors import RewardError
from areno.rewards.math import math_verify_reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so it is \\boxed{72}", "72"),
        ("\\boxed{72}", ["72", "73"]),
        ("\\boxed{72}", 72),
        ("\\boxed{1,000}", "1000"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{\\$12.50}", "12.50"),
        ("\\boxed{1+x}", "x+1"),
        ("first \\boxed{3}, no: \\boxed{4}", "4"),
        ("\\boxed{4}", "the result is \\boxed{4}"),
        ("The answer is 72.", "72"),
    ],
)
def test_equal_answers_earn_one(completion, answer):
    assert math_verify_reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    "completion", ["\\boxed{71}", "", "I do not know", "first \\boxed{72}, no: \\boxed{4}", "\\boxed{"]
)
def test_other_answers_earn_zero(completion):
    assert math_verify_reward(completion, "72") == 0.0


def test_tower_of_powers_is_wrong_and_does_not_hang():
    start = time.monotonic()
    assert math_verify_reward("\\boxed{9^{9^{9^9}}}", "72") == 0.0
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("answer", [None, "", [], [None], " "])
def test_row_without_a_reference_answer_is_an_error(answer):
    with pytest.raises(RewardError, match="no reference answer"):
        math_verify_reward("\\boxed{1}", answer)


def test_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(math_verify_reward("\\boxed{72}", "72")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_missing_extra_names_the_install_command():
    code = "import sys; sys.modules['math_verify'] = None; import areno.rewards.math"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "areno[math]"' in done.stderr
