"""Arithmetic problems, and a calculator that does one operation at a time.

A problem such as ``(37 + 58) * 64 - 912`` takes several turns: each call of ``calculate`` gives one intermediate result,
and the last answer has the form ``Answer: 5168``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from areno.api.agentic.environment import Answer, Environment
from areno.api.agentic.tools import ToolError

RIGHT, WRONG, NONE = 1.0, 0.0, -1.0
Operator = Literal["+", "-", "*"]
_DO: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_ANSWER = re.compile(r"Answer: (-?\d+)")
_LIMIT = 10**12


def draw_record(rng: random.Random, *, long: bool = False) -> dict[str, Any]:
    """Return a problem with its steps.

    Args:
        rng: source of random numbers.
        long: make a problem with four operations instead of two.
    """
    value = rng.randint(10, 99)
    text, steps, last = str(value), [], ""
    for _ in range(4 if long else 2):
        operator: Operator = rng.choice(("+", "-", "*"))
        right = rng.randint(2, 9) if operator == "*" else rng.randint(10, 99)
        steps.append({"left": value, "operator": operator, "right": right})
        value = _DO[operator](value, right)
        text = f"({text}) * {right}" if operator == "*" and last in ("+", "-") else f"{text} {operator} {right}"
        last = operator
    return {"problem": text, "steps": steps, "solutions": [str(value)]}


class Calculator(Environment):
    """Environment of one problem. An answer without a tool call ends the episode.

    The reward is 1.0 if the last answer has the right number after ``Answer:``, 0.0 for any other number, and -1.0 without
    a number.
    """

    def reset(self, record: Mapping[str, Any]) -> str:
        """Set up the problem of ``record``."""
        self.steps = record["steps"]
        self.calls, self.right, self._said = 0, int(record["solutions"][0]), ""
        return f"Work out {record['problem']}. Use calculate for each operation, then say: Answer: number"

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the only tool, the calculator."""
        return [self.calculate]

    def calculate(self, left: int, operator: Operator, right: int) -> int:
        """The result of one operation."""
        self.calls += 1
        return self.operate(left, operator, right)

    @staticmethod
    def operate(left: int, operator: Operator, right: int) -> int:
        """Return the result of one operation.

        Raises:
            ToolError: a number is too large.
        """
        if max(abs(left), abs(right)) >= _LIMIT:
            raise ToolError(f"numbers may have {len(str(_LIMIT)) - 1} digits at most")
        return _DO[operator](left, right)

    def step(self, answer: Answer) -> str | None:
        """Return None, which ends the episode, after an answer without a tool call."""
        self._said = answer.text
        return "" if answer.results else None

    def reward(self) -> float:
        """Return the reward; see the class."""
        found = _ANSWER.findall(self._said)
        if not found:
            return NONE
        return RIGHT if int(found[-1]) == self.right else WRONG
