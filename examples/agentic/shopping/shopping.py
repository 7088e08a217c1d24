"""Shopping in four steps: search the catalog, inspect the results, check the kit, and submit the kit.

The catalog has two items of each of three kinds, and their prices differ from record to record. A task requests a kit
with one item of each of several kinds, within a budget. Only the cheapest item of each kind fits the budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from areno.api.agentic.environment import Answer, Environment
from areno.api.agentic.tools import ToolError

RIGHT, SHORTCUT, TOO_DEAR, WRONG, NOTHING = 1.0, 0.5, 0.4, -0.5, -1.0
Kind = Literal["lamp", "tent", "stove"]
CATALOG: dict[str, Kind] = {
    "L1": "lamp",
    "L2": "lamp",
    "T1": "tent",
    "T2": "tent",
    "S1": "stove",
    "S2": "stove",
}
TASKS: dict[str, tuple[Kind, ...]] = {
    "an evening in the garden": ("lamp", "stove"),
    "a night outdoors": ("lamp", "tent"),
    "a weekend in the hills": ("tent", "stove"),
    "a week of hiking": ("lamp", "tent", "stove"),
}
STEPS = ("search_catalog", "inspect_items", "check_kit", "submit_bundle")


def draw_record(rng: random.Random) -> dict[str, Any]:
    """Return a task with prices and a budget."""
    task = rng.choice(sorted(TASKS))
    prices = {}
    for kind in ("lamp", "tent", "stove"):
        ids = [item for item, of_kind in CATALOG.items() if of_kind == kind]
        cheap, dear = sorted(rng.sample(range(10, 60), 2))
        prices |= dict(zip(rng.sample(ids, 2), (cheap, dear), strict=True))
    return {"task": task, "prices": prices, "budget": sum(cheapest(prices, kind) for kind in TASKS[task])}


def cheapest(prices: Mapping[str, int], kind: str) -> int:
    """Return the lower price of a kind."""
    return min(prices[item] for item, of_kind in CATALOG.items() if of_kind == kind)


class Shopping(Environment):
    """Environment of one task. The episode ends when a kit is submitted, or after an answer without a tool call.

    The reward is 1.0 for the right kit after all four steps in order, 0.5 for the right kit otherwise, 0.4 for a complete kit
    that is too expensive, -0.5 for any other kit, and -1.0 if no kit was submitted.
    """

    def reset(self, record: Mapping[str, Any]) -> str:
        """Set up the task of ``record``."""
        self.kinds, self.prices, self.budget = TASKS[record["task"]], record["prices"], record["budget"]
        self.used: list[str] = []
        self.submitted: list[str] | None = None
        return (
            f"Put together a kit for {record['task']}: one {' and one '.join(self.kinds)}, for {self.budget} at most. "
            "Search the catalog, inspect the items, check the kit, then submit it."
        )

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the four tools."""
        return [self.search_catalog, self.inspect_items, self.check_kit, self.submit_bundle]

    def search_catalog(self, kinds: list[Kind]) -> list[str]:
        """Items of some kinds."""
        self.used.append("search_catalog")
        return [item for item, kind in CATALOG.items() if kind in kinds]

    def inspect_items(self, items: list[str]) -> dict[str, int]:
        """Prices of items."""
        self.used.append("inspect_items")
        return {item: self.prices[item] for item in _known(items)}

    def check_kit(self, items: list[str]) -> dict[str, Any]:
        """What a kit costs, and whether it has what is needed."""
        self.used.append("check_kit")
        cost = sum(self.prices[item] for item in _known(items))
        return {"complete": self._complete(items), "cost": cost, "within_budget": cost <= self.budget}

    def submit_bundle(self, items: list[str]) -> str:
        """Buy a kit; the last step."""
        self.submitted = _known(items)
        self.used.append("submit_bundle")
        return "submitted"

    def step(self, answer: Answer) -> str | None:
        """Return None, which ends the episode, when a kit was submitted or the answer has no tool call."""
        return "" if answer.results and self.submitted is None else None

    def reward(self) -> float:
        """Return the reward; see the class."""
        if self.submitted is None:
            return NOTHING
        if not self._complete(self.submitted):
            return WRONG
        if sum(self.prices[item] for item in self.submitted) > self.budget:
            return TOO_DEAR
        return RIGHT if self.used == list(STEPS) else SHORTCUT

    def _complete(self, items: Sequence[str]) -> bool:
        return sorted(CATALOG[item] for item in items) == sorted(self.kinds)


def _known(items: list[str]) -> list[str]:
    unknown = [item for item in items if item not in CATALOG]
    if unknown:
        raise ToolError(f"there is no item {', '.join(unknown)}; the items are {', '.join(CATALOG)}")
    return items
