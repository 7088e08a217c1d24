"""An expert that does the operations in order; see ``../warm_start.py``."""

from __future__ import annotations

from calculator import Calculator, draw_record

from areno.api.agentic.demonstrations import Course, Message, calls, says


def work_out(task: Calculator) -> Message:
    """Return the next operation as a tool call, or the answer."""
    if task.calls < len(task.steps):
        return calls(("calculate", task.steps[task.calls]))
    return says(f"Answer: {task.right}")


EXPERT = Course(Calculator, draw_record, work_out)
