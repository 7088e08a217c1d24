"""When to save, to evaluate and to keep a recovery point: every so many epochs, steps or seconds, whichever comes first.

Special here: the three counters are independent; each begins anew only when it has itself come due, so "every 100 steps"
stays that beside "every epoch". Whatever has a rhythm of its own has a control of its own.
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
    """A step and its place in the run; indices count from 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int
    total_steps: int

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last one of its epoch."""
        return self.epoch_step + 1 == self.steps_per_epoch

    @property
    def is_last(self) -> bool:
        """Whether it is the last one of the run."""
        return self.global_step + 1 >= self.total_steps

    def next(self) -> StepInfo:
        """The step after it."""
        if self.ends_epoch:
            return replace(self, epoch=self.epoch + 1, epoch_step=0, global_step=self.global_step + 1)
        return replace(self, epoch_step=self.epoch_step + 1, global_step=self.global_step + 1)


class FrequencyControl:
    """One rhythm; raises :class:`UsageError` for a frequency that is not above 0. ``clock`` gives seconds."""

    def __init__(self, frequency: Frequency, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = {"epochs": frequency.epochs, "steps": frequency.steps, "secs": frequency.seconds}
        for unit, value in self._every.items():
            if value is not None and value <= 0:
                raise UsageError(f"freq_{unit}={value}: give a number above 0, or null to leave it out")
        self._first, self._last, self._clock = frequency.first, frequency.last, clock
        self._epochs = self._steps = 0
        self._since = clock()

    def due_before_training(self) -> bool:
        """Whether it is due before the first step; True at most once in a run, recovered or not."""
        due, self._first = self._first, False
        return due

    def check(self, at: StepInfo) -> bool:
        """Count a finished step, once for each; returns whether it is due now."""
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
        """The counters."""
        return {
            "epochs": self._epochs,
            "steps": self._steps,
            "secs": self._elapsed(self._clock()),
            "before_training": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there; the time between is not counted."""
        self._epochs, self._steps = state["epochs"], state["steps"]
        self._since = self._clock() - state["secs"]
        self._first = self._first and state["before_training"]
