"""Decides when to save models, evaluate and write checkpoints: every N epochs, steps or seconds, or any combination.

The counters of the three units are independent: each counter restarts only when its own interval has passed. For example,
"every epoch" does not affect "every 100 steps". Each action has a separate :class:`FrequencyControl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from areno.errors import UsageError
from areno.spec.run_spec import Frequency


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step and its position in the run. All indices start at 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int
    total_steps: int

    @property
    def ends_epoch(self) -> bool:
        """Whether the step is the last step of its epoch."""
        return self.epoch_step + 1 == self.steps_per_epoch

    @property
    def is_last(self) -> bool:
        """Whether the step is the last step of the run."""
        return self.global_step + 1 >= self.total_steps

    def next(self) -> StepInfo:
        """Return the next step."""
        if self.ends_epoch:
            return replace(self, epoch=self.epoch + 1, epoch_step=0, global_step=self.global_step + 1)
        return replace(self, epoch_step=self.epoch_step + 1, global_step=self.global_step + 1)


class FrequencyControl:
    """The schedule of one action of the training loop, such as evaluating or saving models.

    Raises UsageError if an interval is not above 0. ``clock`` returns the time in seconds.
    """

    def __init__(self, frequency: Frequency, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = {"epochs": frequency.epochs, "steps": frequency.steps, "secs": frequency.seconds}
        for unit, value in self._every.items():
            if value is not None and value <= 0:
                raise UsageError(
                    f"freq_{unit}={value} is not above 0; use a number above 0, or null to disable this interval"
                )
        self._first, self._last, self._clock = frequency.first, frequency.last, clock
        self._epochs = self._steps = 0
        self._since = clock()

    def due_before_training(self) -> bool:
        """Return whether the action is due before the first step. Returns True at most once per run, even after a resume."""
        due, self._first = self._first, False
        return due

    def check(self, at: StepInfo) -> bool:
        """Count a finished step, and return whether the scheduled action, such as an evaluation, is due now.

        Call this method once per step.
        """
        self._first = False
        self._steps += 1
        self._epochs += at.ends_epoch
        now = self._clock()
        counted = {"epochs": self._epochs, "steps": self._steps, "secs": self._elapsed(now)}
        due = {unit for unit, every in self._every.items() if every is not None and counted[unit] >= every}
        self._epochs = 0 if "epochs" in due else self._epochs
        self._steps = 0 if "steps" in due else self._steps
        self._since = now if "secs" in due else self._since
        return bool(due) or (self._last and at.is_last)

    def _elapsed(self, now: float) -> float:
        return now - self._since

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {
            "epochs": self._epochs,
            "steps": self._steps,
            "secs": self._elapsed(self._clock()),
            "before_training": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters. The time between saving and restoring the counters is not counted."""
        self._epochs, self._steps = state["epochs"], state["steps"]
        self._since = self._clock() - state["secs"]
        self._first = self._first and state["before_training"]
