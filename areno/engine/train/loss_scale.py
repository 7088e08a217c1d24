"""The loss scale of fp16 training: as large as gradients allow, so that small ones do not become zero in 16 bits.

A step whose gradient is not finite is left out. After ``hysteresis`` such steps the scale is halved, and after ``window`` steps
in a row whose gradient was finite it is doubled, as Megatron's does it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LossScale:
    """What losses are multiplied by before the backward pass, and gradients divided by after it."""

    value: float = 2.0**32
    least: float = 1.0
    window: int = 5
    hysteresis: int = 2
    good: int = 0  # steps in a row
    bad: int = 0  # since the scale last grew

    @property
    def may_fall(self) -> bool:
        """Whether a gradient that is not finite may be the scale's doing."""
        return self.value > self.least

    def update(self, finite: bool) -> None:
        """Note whether a step's gradient was finite."""
        if not finite:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= self.hysteresis:
                self.value = max(self.value / 2, self.least)
            return
        self.good += 1
        if self.good >= self.window:
            self.good, self.bad, self.value = 0, 0, self.value * 2
