"""The run specification: how long a run goes on, what it measures when, and what it keeps. Importing it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often something is done: whichever of the three comes first, each counted on its own.

    Attributes:
        epochs: every so many epochs; None does not count them.
        steps: every so many steps; None does not count them.
        seconds: every so many seconds; None does not count them.
        first: also once before the first step.
        last: also after the last step.
    """

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    first: bool = False
    last: bool = False

    @property
    def given(self) -> bool:
        """Whether one of the three is given."""
        return any(value is not None for value in (self.epochs, self.steps, self.seconds))


@dataclass(frozen=True, slots=True)
class Span:
    """How long a run goes on, at most all its epochs: ``steps``, and the step with which so many ``sequences`` are trained."""

    steps: int | None = None
    sequences: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Checkpoints that a run can resume from.

    Attributes:
        folder: holds them.
        every: when they are written.
        newest: how many are kept; None keeps all.
        best: the one with the best evaluation is kept too.
        enabled: False neither writes nor looks for them.
        saves_optimizer: they hold the state of the optimizer.
        loads_optimizer: a resumed run goes on with it.
        strict: refuse checkpoints without a manifest, and folders that other users could have written to.
        remedy: what helps where the disk is full.
    """

    folder: Path
    every: Frequency
    newest: int | None = None
    best: bool = False
    enabled: bool = True
    saves_optimizer: bool = True
    loads_optimizer: bool = True
    strict: bool = False
    remedy: str = "free some space, or keep fewer checkpoints"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One training run.

    Attributes:
        span: how long it goes on.
        evaluation: when the held-out rows are measured.
        patience: the run ends when so many evaluations in a row were not the best one; None goes on.
        evaluated_with: settings that two evaluations must share to be comparable.
        checkpoints: what it can be resumed from.
        resumed: it goes on with an earlier attempt's files.
    """

    span: Span
    evaluation: Frequency
    checkpoints: CheckpointSpec
    patience: int | None = None
    evaluated_with: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
