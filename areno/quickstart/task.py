"""The toy task of the quickstart: sums of three-digit numbers with a verifiable reward.

A question has one of three wordings. For the wording "Step by step, what is 347 + 182?", all demonstrations show the work,
which is the addition digit by digit. For the plain wordings, such as "What is 347 + 182?", most demonstrations state only the
answer. After SFT, the model rarely shows the work for a plain wording. GSPO rewards only the correct answer, and the model
learns to show the work for every wording. A hash of the two numbers decides whether a sum is held out.
"""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOW, HIGH = 100, 499  # so that every sum has three digits too
HELD_OUT_ONE_IN = 20
# Maps each wording to the fraction of its demonstrations that show the work.
WORDINGS = {"What is {a} + {b}?": 0.2, "Calculate {a} + {b}.": 0.2, "Step by step, what is {a} + {b}?": 1.0}

# Files written next to the data, so that the printed `areno train` commands can be run unchanged.
REWARD_FILE = '''"""1.0 if the completion ends in the correct `Answer: N`, else 0.0; the steps before it are ignored."""

import re


def reward_fn(record):
    match = re.search(r"Answer: (\\d+)$", record.completion.strip())
    return float(match is not None and match.group(1) == record.answer[0])
'''
LOADER_FILE = '''"""The rows already have `prompt`, `response` and `solutions`."""


def load_training_dataset(dataset_path, *, default_loader, **_):
    return default_loader(dataset_path)
'''


@dataclass(frozen=True, slots=True)
class Problem:
    """The addition of two numbers, and the wording of the question."""

    a: int
    b: int
    wording: str

    @property
    def question(self) -> str:
        """The user message."""
        return self.wording.format(a=self.a, b=self.b)

    @property
    def held_out(self) -> bool:
        """Whether the problem is reserved for evaluation. This depends only on ``a`` and ``b``, not on ``wording``."""
        digest = hashlib.sha256(f"{self.a}+{self.b}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0

    def row(self, rng: random.Random) -> dict[str, Any]:
        """Return a data row with the question, a demonstration and the solution.

        ``rng`` decides whether the demonstration shows the work or states only the answer.
        """
        shows_work = rng.random() < WORDINGS[self.wording]
        response = worked_answer(self.a, self.b) if shows_work else f"Answer: {self.a + self.b}"
        return {"prompt": self.question, "response": response, "solutions": [str(self.a + self.b)]}


def problem_count() -> int:
    """Return the number of ordered pairs of summands (a, b) in the task."""
    return (HIGH - LOW + 1) ** 2


def draw_problems(seed: int, count: int, *, held_out: bool, weights: tuple[int, ...] = (1, 1, 1)) -> list[Problem]:
    """Draw ``count`` problems: held-out problems, or training problems if ``held_out`` is False.

    No two problems add the same numbers in the same order. The wording of each problem is drawn with the relative frequencies
    ``weights``.
    """
    rng = random.Random(seed)
    wordings = [wording for wording, weight in zip(WORDINGS, weights, strict=True) for _ in range(weight)]
    seen: set[tuple[int, int]] = set()
    problems: list[Problem] = []
    while len(problems) < count:
        problem = Problem(rng.randint(LOW, HIGH), rng.randint(LOW, HIGH), rng.choice(wordings))
        if (problem.a, problem.b) not in seen and problem.held_out == held_out:
            seen.add((problem.a, problem.b))
            problems.append(problem)
    return problems


def worked_answer(a: int, b: int) -> str:
    """Return the addition digit by digit: for 347 and 182, ``7+2=9 carry 0, 4+8+0=2 carry 1, 3+1+1=5. Answer: 529``."""
    (a1, b1), (a2, b2), (a3, b3) = ((int(x), int(y)) for x, y in zip(str(a)[::-1], str(b)[::-1], strict=True))
    carry1, ones = divmod(a1 + b1, 10)
    carry2, tens = divmod(a2 + b2 + carry1, 10)
    return (
        f"{a1}+{b1}={ones} carry {carry1}, {a2}+{b2}+{carry1}={tens} carry {carry2}, "
        f"{a3}+{b3}+{carry2}={a3 + b3 + carry2}. Answer: {a + b}"
    )


def is_right(problem: Problem, completion: str) -> bool:
    """Whether a completion ends in ``Answer: N`` with the correct sum N. The reward in ``REWARD_FILE`` uses the same rule."""
    return completion.strip().endswith(f"Answer: {problem.a + problem.b}")


def write_rows(path: Path, problems: Iterable[Problem], seed: int) -> None:
    """Write problems with their demonstrations as JSON lines."""
    rng = random.Random(seed)
    path.write_text("".join(json.dumps(p.row(rng)) + "\n" for p in problems), encoding="utf-8")
