"""The run specification: how long a run goes on, what it measures when, and what it keeps. Importing it loads no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often something is done: whichever of the three comes first, each counted on its own."""

    epochs: int | None = None  # every so many epochs; None does not count them
    steps: int | None = None  # every so many steps; None does not count them
    seconds: float | None = None  # every so many seconds; None does not count them
    first: bool = False  # also once before the first step
    last: bool = False  # also after the last step

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
    """Checkpoints that a run can resume from."""

    folder: Path  # holds them
    every: Frequency  # when they are written
    newest: int | None = None  # how many are kept; None keeps all
    best: bool = False  # the one with the best evaluation is kept too
    enabled: bool = True  # False neither writes nor looks for them
    saves_optimizer: bool = True  # they hold the state of the optimizer
    loads_optimizer: bool = True  # a resumed run goes on with it
    strict: bool = False  # refuse checkpoints without a manifest, and folders that other users could have written to
    remedy: str = "free some space, or keep fewer checkpoints"  # what helps where the disk is full


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One training run.

    Attributes:
        evaluated_with: settings that two evaluations must share to be comparable.
    """

    span: Span  # how long it goes on
    evaluation: Frequency  # when the held-out rows are measured
    checkpoints: CheckpointSpec  # what it can be resumed from
    patience: int | None = None  # the run ends when so many evaluations in a row were not the best one; None goes on
    evaluated_with: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False  # it goes on with an earlier attempt's files
