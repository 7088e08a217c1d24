"""GSM8K's own form of an answer: steps in a few sentences, then the result alone on the last line, behind ``####``.

One file for both options: ``--dataset-loader-fn`` and ``--reward-fn-path``. A small chat model knows the arithmetic of few of
these problems, and the form of half of its answers is right; the reward has a part for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from areno.types import RewardRecord

INSTRUCTION = "Solve the problem in a few short sentences. Write the result alone on the last line, behind ####."
EXAMPLE = (
    "Tom has 3 boxes with 4 pens each. He gives 5 pens away. How many pens are left?",
    "The boxes hold 3 * 4 = 12 pens. Without the 5 that he gives away, 12 - 5 = 7 are left.\n#### 7",
)
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_LAST_LINE = re.compile(rf"\n#### ({_NUMBER})\s*\Z")
_SOMEWHERE = re.compile(rf"####\s*\$?({_NUMBER})")


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Rows with ``question`` and ``answer`` as conversations: a worked example, then the problem."""
    return [
        {"prompt": messages(row["question"]), "solutions": [row["answer"].rpartition("####")[2].strip()]}
        for row in default_loader(dataset_path)
    ]


def messages(problem: str) -> list[dict[str, str]]:
    """The conversation that asks for the answer to ``problem``."""
    turns = [f"{INSTRUCTION}\n\n{EXAMPLE[0]}", EXAMPLE[1], problem.strip()]
    return [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(turns)]


def reward_fn(record: RewardRecord) -> dict[str, float]:
    """The parts ``form``, which is 0.5 for a result behind ``####`` in another place, and ``right``."""
    if record.answer is None:
        raise KeyError("the row has no reference answer; use this file as --dataset-loader-fn too")
    text = record.completion
    results = _SOMEWHERE.findall(text)
    in_form = bool(_LAST_LINE.search(text)) and text.count("####") == 1
    right = bool(results) and _value(results[-1]) == _value(record.answer[0])
    return {"form": 1.0 if in_form else 0.5 * bool(results), "right": float(right)}


def _value(number: str) -> float:
    return float(number.replace(",", ""))
