"""Learning rate as a function of the optimizer step."""

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """Linear warmup to ``lr``, followed by decay to ``min_lr``. If ``style`` is ``constant``, ``lr`` does not decay."""

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0  # steps k <= warmup_steps run at lr * k / warmup_steps
    decay_steps: int = 0  # step at which ``min_lr`` is reached, counted from the start of the warmup
    style: DecayStyle = "constant"

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.style == "constant":
            return self.lr
        progress = (step - self.warmup_steps) / max(self.decay_steps - self.warmup_steps, 1)
        progress = min(max(progress, 0.0), 1.0)
        factor = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + factor * (self.lr - self.min_lr)
