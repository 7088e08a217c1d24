"""GSM8K's answer format: steps in a few sentences, then the result alone on the last line, after ``####``.

Pass this file to both ``--dataset-loader-fn`` and ``--reward-fn-path``. A small chat model solves few of these problems,
but half of its answers have the right format. The reward has one part for the format and one part for the result.
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
    """Turn rows with ``question`` and ``answer`` into conversations: a worked example, then the problem."""
    return [
        {"prompt": messages(row["question"]), "solutions": [row["answer"].rpartition("####")[2].strip()]}
        for row in default_loader(dataset_path)
    ]


def messages(problem: str) -> list[dict[str, str]]:
    """Return the conversation whose last message is ``problem``."""
    turns = [f"{INSTRUCTION}\n\n{EXAMPLE[0]}", EXAMPLE[1], problem.strip()]
    return [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(turns)]


def reward_fn(record: RewardRecord) -> dict[str, float]:
    """Return the parts ``form`` (0.5 if the result after ``####`` is not on the last line) and ``right``."""
    if record.answer is None:
        raise KeyError("the row has no reference answer; use this file as --dataset-loader-fn too")
    text = record.completion
    results = _SOMEWHERE.findall(text)
    in_form = bool(_LAST_LINE.search(text)) and text.count("####") == 1
    right = bool(results) and _value(results[-1]) == _value(record.answer[0])
    return {"form": 1.0 if in_form else 0.5 * bool(results), "right": float(right)}


def _value(number: str) -> float:
    return float(number.replace(",", ""))
