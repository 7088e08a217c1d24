"""The loss scale of fp16 training, which keeps small gradients from underflowing to 0.

The scale is kept as large as is possible without overflow of the gradients. An optimizer step whose gradient is not
finite is skipped. Beginning with the ``hysteresis``-th skipped step, each skipped step halves the scale. After
``window`` consecutive steps with a finite gradient, the scale is doubled, and the count of skipped steps is reset.
Megatron uses the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LossScale:
    """The factor by which losses are multiplied before the backward pass, and by which gradients are divided afterwards."""

    value: float = 2.0**32
    least: float = 1.0
    window: int = 5
    hysteresis: int = 2
    good: int = 0  # consecutive steps with a finite gradient
    bad: int = 0  # skipped steps since the scale was last doubled

    @property
    def may_fall(self) -> bool:
        """Whether the scale can still be reduced, which may make a non-finite gradient finite."""
        return self.value > self.least

    def update(self, finite: bool) -> None:
        """Adjust the scale after an optimizer step. ``finite`` is whether the gradient of the step was finite."""
        if not finite:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= self.hysteresis:
                self.value = max(self.value / 2, self.least)
            return
        self.good += 1
        if self.good >= self.window:
            self.good, self.bad, self.value = 0, 0, self.value * 2
