"""The run specification: duration, evaluation and checkpoints. Does not import torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often something is done: whenever one of the three intervals has passed; None ignores that interval."""

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    first: bool = False  # also before the first step
    last: bool = False  # also after the last step

    @property
    def given(self) -> bool:
        """Whether at least one of the three intervals is set."""
        return any(value is not None for value in (self.epochs, self.steps, self.seconds))


@dataclass(frozen=True, slots=True)
class Span:
    """Limits of a run besides its epochs: ``steps``, and ``sequences`` trained on (the step that reaches them is the last)."""

    steps: int | None = None
    sequences: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Checkpoints to resume a run from."""

    folder: Path
    every: Frequency  # when they are written
    newest: int | None = None  # number to keep; None keeps all
    best: bool = False  # also keep the one with the best evaluation
    enabled: bool = True  # False neither writes nor reads them
    saves_optimizer: bool = True  # they contain the optimizer state
    loads_optimizer: bool = True  # resuming restores the optimizer state
    strict: bool = False  # reject checkpoints without a manifest, and folders that are writable by other users
    remedy: str = "free some space, or keep fewer checkpoints"  # advice when the disk is full


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One training run.

    Attributes:
        evaluated_with: settings that two evaluations must share to be comparable.
    """

    span: Span
    evaluation: Frequency
    checkpoints: CheckpointSpec
    patience: int | None = (
        None  # evaluations in a row without a new best that end the run; None disables early stopping
    )
    evaluated_with: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False  # continues an earlier attempt in the same folder
