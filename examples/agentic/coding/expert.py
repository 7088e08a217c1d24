"""Expert that knows the correct module; see ``../warm_start.py``. It reads and writes the file, runs the tests, and reports."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bugs import BUGS
from coding import Repair

from areno.api.agentic.demonstrations import Course, Message, calls, says

_RIGHT = {f"{bug.name}.py": bug.right for bug in BUGS}
_TASKS = Path(__file__).with_name("dataset.jsonl").read_text(encoding="utf-8").splitlines()


def draw(rng: random.Random) -> dict[str, Any]:
    """Return one of the tasks."""
    task: dict[str, Any] = json.loads(rng.choice(_TASKS))
    return task


def repair(task: Repair) -> Message:
    """Return the next answer."""
    path = task.record["files"][0]["path"]
    steps = [
        calls(("read_file", {"path": path})),
        calls(("write_file", {"path": path, "content": _RIGHT[path]})),
        calls(("run_tests", {})),
        says("It is repaired."),
    ]
    return steps[task.turns]


EXPERT = Course(Repair, draw, repair)
