"""The math-verify reward: symbolic equality, the last box, and answers that must not stop a run."""

import logging
import subprocess
import sys
import threading
import time

import pytest

from areno.config.packages import install_command
from areno.errors import RewardError
from areno.rewards import math as math_reward
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


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        *(("72", text) for text in ("72.", "72 dollars", "the answer is 72", "Answer: 72", "It costs $72.", "#### 72")),
        *(("72", text) for text in ("$72$ square meters", "72 cm^2", "8*9 = 72, so the answer is 72 pens.")),
        ("72", "The answer is \\boxed{72 dollars}."),
        ("72.", "72"),
        ("72 dollars", "72"),
        ("1/2", "1/2 cup"),
        ("7", "7 years old"),
        ("-3", "-3 degrees"),
        ("1000", "1,000 dollars"),
        ("1000", "1 000"),
        ("1.5", "1 1/2 cups"),
        ("0.00001", "1e-05"),
        ("3\\sqrt{2}", "3\\sqrt{2} meters"),
        ("3, 5", "3 and 5 apples"),
        ("73, 72", "72 or 73"),
        ("5", "v_{initial} = 5"),
        ("\\text{yes}", "Yes"),
    ],
)
def test_words_around_a_result_do_not_change_it(result, answer):
    assert math_verify_reward(f"so \\boxed{{{result}}}.", answer) == 1.0


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        *((text, "72 dollars") for text in ("720", "7.2", "-72", "72 or 73", "72 dollars or 73 dollars", "72 73")),
        *((text, "72") for text in ("720 dollars", "not 72", "at least 72")),
        *(
            ("72", text)
            for text in ("-72 dollars", "72 or 73", "72 dollars or 73 dollars", "at least 72", "72x apples")
        ),
        ("3", "3\\sqrt{2} meters"),
        ("3", "5 apples and 3 pears"),
        ("1", "1 1/2 cups"),
        ("0", "1 000"),
        ("4", "July 4th, 2024"),
        ("London", "Paris"),
        *(("Mot", text) for text in ("Tom", "\\text{Tom}", "so the answer is \\boxed{Tom}")),
        ("\\text{silent}", "listen"),
        ("BCA", "ABC"),
        ("New York", "York New"),
    ],
)
def test_words_around_a_wrong_result_do_not_make_it_right(result, answer):
    assert math_verify_reward(f"so \\boxed{{{result}}}.", answer) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{\\text{new  york}}", "New York."),
        ("The answer is $Paris$.", "Paris"),
        ("\\boxed{y \\cdot x}", "xy"),
        ("\\boxed{x*y}", "y*x"),
        ("\\boxed{2yx}", "2xy"),
        ("\\boxed{xy + 1}", "1 + yx"),
        ("\\boxed{r\\pi}", "\\pi r"),
    ],
)
def test_words_are_compared_as_text_and_products_of_letters_symbolically(completion, answer):
    assert math_verify_reward(completion, answer) == 1.0


def test_a_reference_without_a_single_result_is_warned_about_once(caplog):
    math_reward._text_warning_logged.clear()
    with caplog.at_level(logging.WARNING, "areno.rewards.math"):
        for answer in ("72 dollars", "5 apples and 3 pears", "a few pears"):
            math_verify_reward("\\boxed{3}", answer)
    assert ["5 apples and 3 pears" in message for message in caplog.messages] == [True]


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
    assert f"install it with: {install_command('math')}" in done.stderr
