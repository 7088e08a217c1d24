"""Expert that makes the four calls in order; see ``../warm_start.py``."""

from __future__ import annotations

from shopping import CATALOG, Shopping, cheapest, draw_record

from areno.api.agentic.demonstrations import Course, Message, calls


def shop(task: Shopping) -> Message:
    """Return the next tool call."""
    kit = [
        item
        for item, kind in CATALOG.items()
        if kind in task.kinds and task.prices[item] == cheapest(task.prices, kind)
    ]
    steps = [
        calls(("search_catalog", {"kinds": list(task.kinds)})),
        calls(("inspect_items", {"items": [item for item, kind in CATALOG.items() if kind in task.kinds]})),
        calls(("check_kit", {"items": kit})),
        calls(("submit_bundle", {"items": kit})),
    ]
    return steps[len(task.used)]


EXPERT = Course(Shopping, draw_record, shop)
