"""Rows of mathematics data sets as prompts with a checkable answer.

Accepts GSM8K (``question``, ``answer`` with the result after ``####``), NuminaMath (``problem``, ``solution`` with the
result in ``\\boxed{}``) and rows that already have a ``prompt``. Each returned row has:

* ``prompt``: the problem, and the request to put the result into ``\\boxed{}``;
* ``solutions``: a list with the result, for the reward;
* ``response``: the worked solution ending in the boxed result, so that the same loader also works for SFT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


def load_training_dataset(dataset_path: str, *, default_loader: Callable[[str], Any], **_: Any) -> list[dict[str, Any]]:
    """Load ``dataset_path`` and convert its rows, without problems whose solution states no result.

    Raises:
        KeyError: a row has none of the known formats; the message lists its keys.
    """
    rows = (normalize(row) for row in default_loader(dataset_path))
    return [row for row in rows if row is not None]


def normalize(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a row with ``prompt``, ``solutions`` and ``response``, or None if the solution states no result."""
    if row.get("prompt") is not None:
        return dict(row)
    if "question" in row and "answer" in row:
        steps, _, final = row["answer"].rpartition("####")
        # Annotations such as "<<2+3=5>>" are for a calculator; a model should not learn to write them.
        steps = _CALCULATOR_NOTE.sub("", steps).strip()
        return _row(row, row["question"], f"{steps}\nThe final answer is", final.strip().replace(",", ""))
    if "problem" in row and "solution" in row:
        final = last_boxed(row["solution"])
        return _row(row, row["problem"], f"{row['solution'].strip()}\nThe final answer is", final)
    raise KeyError(
        "a row needs `prompt`, or `question` and `answer` (GSM8K), or `problem` and `solution` (NuminaMath); "
        f"this row has {', '.join(sorted(row))}"
    )


def last_boxed(text: str) -> str:
    """Return the content of the last ``\\boxed{...}``, with nested braces; empty if there is none."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return ""
    begin += len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return ""


def _row(row: Mapping[str, Any], problem: str, worked: str, final: str) -> dict[str, Any] | None:
    if not final:
        return None
    return {
        **row,
        "prompt": f"{problem.strip()}\n{INSTRUCTION}",
        "solutions": [final],
        "response": f"{worked} \\boxed{{{final}}}.",
    }
