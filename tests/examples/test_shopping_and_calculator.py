"""The two examples of tool use in several steps: data against plain Python, and every value of their rewards."""

from __future__ import annotations

import random
import sys
from itertools import combinations

import pytest

from areno.api.agentic.demonstrations import calls, says
from tests.examples import scripted

for name in ("shopping", "calculator"):
    sys.path.insert(0, str(scripted.FOLDER / name))

from calculator import draw_record as draw_problem  # noqa: E402
from shopping import CATALOG, TASKS  # noqa: E402
from shopping import draw_record as draw_task  # noqa: E402


def reward(example, row, *answers):
    return scripted.replayed(scripted.reward(example), row, answers)


@pytest.mark.parametrize("long", [False, True])
def test_problems_are_what_python_makes_of_them(long):
    for seed in range(300):
        row = draw_problem(random.Random(seed), long=long)
        value = eval(row["problem"])  # our own text
        assert row["solutions"] == [str(value)]
        assert [eval(f"{s['left']} {s['operator']} {s['right']}") for s in row["steps"]][-1] == value
        assert len(row["steps"]) == (4 if long else 2)


PROBLEM = {"problem": "(2 + 3) * 4", "steps": [], "solutions": ["20"]}
ADD = calls(("calculate", {"left": 2, "operator": "+", "right": 3}))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([ADD, calls(("calculate", {"left": 5, "operator": "*", "right": 4})), says("Answer: 20")], 1.0),
        ([says("Answer: 20")], 1.0),
        ([ADD, says("Answer: 5, no, Answer: 20")], 1.0),
        ([says("<think>Answer: 20</think>Answer: 21")], 0.0),
        ([says("20")], -1.0),
        ([ADD], -1.0),
        ([says("done"), says("Answer: 20")], -1.0),  # it had ended
        ([calls(("calculate", {"left": 2, "operator": "/", "right": 3})), says("Answer: -20")], 0.0),
        ([calls(("calculate", {"left": 10**13, "operator": "*", "right": 3})), says("Answer: 20")], 1.0),
    ],
)
def test_only_the_last_answer_counts(answers, expected):
    assert reward("calculator", PROBLEM, *answers) == expected


def test_only_the_cheapest_kit_fits_into_the_budget():
    for seed in range(200):
        row = draw_task(random.Random(seed))
        kinds = sorted(TASKS[row["task"]])
        kits = [kit for kit in combinations(CATALOG, len(kinds)) if sorted(CATALOG[item] for item in kit) == kinds]
        fitting = [kit for kit in kits if sum(row["prices"][item] for item in kit) <= row["budget"]]
        assert len(fitting) == 1
    assert {draw_task(random.Random(seed))["task"] for seed in range(60)} == set(TASKS)


TASK = {
    "task": "a night outdoors",
    "prices": {"L1": 10, "L2": 20, "T1": 30, "T2": 40, "S1": 15, "S2": 25},
    "budget": 40,
}
SEARCH = ("search_catalog", {"kinds": ["lamp", "tent"]})
INSPECT = ("inspect_items", {"items": ["L1", "T1"]})
CHECK = ("check_kit", {"items": ["L1", "T1"]})


def submit(*items):
    return ("submit_bundle", {"items": list(items)})


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([SEARCH, INSPECT, CHECK, submit("T1", "L1")], 1.0),
        ([submit("L1", "T1")], 0.5),
        ([INSPECT, SEARCH, CHECK, submit("L1", "T1")], 0.5),
        ([SEARCH, SEARCH, INSPECT, CHECK, submit("L1", "T1")], 0.5),
        ([SEARCH, INSPECT, CHECK, submit("L2", "T1")], 0.4),
        ([submit("L1", "S1")], -0.5),
        ([submit("L1", "L1", "T1")], -0.5),
        ([submit()], -0.5),
        ([SEARCH, INSPECT, CHECK], -1.0),
        ([submit("X9")], -1.0),
        ([submit("X9"), submit("L1", "T1")], 0.5),
        ([submit("L1", "S1"), submit("L1", "T1")], -0.5),  # the first one is bought
    ],
)
def test_kits_are_worth_what_is_documented(steps, expected):
    assert reward("shopping", TASK, *(calls(step) for step in steps)) == expected


def test_all_steps_may_be_taken_in_one_answer():
    assert reward("shopping", TASK, calls(SEARCH, INSPECT, CHECK, submit("L1", "T1"))) == 1.0


def test_words_end_the_shopping():
    assert reward("shopping", TASK, says("L1 and T1, please"), calls(submit("L1", "T1"))) == -1.0
