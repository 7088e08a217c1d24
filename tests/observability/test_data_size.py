"""Sizes of a run's data, counted without reading rows that may be computed on access."""

from __future__ import annotations

import pytest
from datasets import Dataset

from areno.observability.data_size import data_size

ROWS = [{"prompt": f"What is {number % 3}?", "solutions": [str(number)]} for number in range(10)]
CHAT = [
    [{"role": "user", "content": f"Hello {number % 4}"}, {"role": "assistant", "content": f"Answer {number}"}]
    for number in range(10)
]


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_examples_and_distinct_prompts_are_counted(make):
    assert data_size(make(ROWS), None, 5) == {"examples": 10, "prompts": 3, "steps_per_epoch": 5}
    held_out = make([{"messages": messages} for messages in CHAT])
    assert data_size(make(ROWS), held_out, 5) == {
        **{"examples": 10, "prompts": 3, "steps_per_epoch": 5},
        **{"held_out_examples": 10, "held_out_prompts": 4},  # although the answers at their ends differ
    }


@pytest.mark.parametrize("rows", [type("Rows", (), {"__len__": lambda self: 7})(), [{"text": "no prompt"}] * 7])
def test_unknown_prompts_are_not_counted(rows):
    assert data_size(rows, None, 1) == {"examples": 7, "steps_per_epoch": 1}
