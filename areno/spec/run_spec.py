"""The run specification: duration, evaluation and checkpoints. This module does not import PyTorch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Frequency:
    """When to save a model, evaluate, or write a checkpoint.

    An action is due when one of the intervals ``epochs``, ``steps`` and ``seconds`` has passed; None disables an interval.
    """

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    first: bool = False  # also before the first step
    last: bool = False  # also after the last step

    @property
    def given(self) -> bool:
        """Whether ``epochs``, ``steps`` or ``seconds`` is set."""
        return any(value is not None for value in (self.epochs, self.steps, self.seconds))


@dataclass(frozen=True, slots=True)
class Span:
    """Limits of a run, in addition to its number of epochs. The step that reaches a limit is the last.

    ``steps`` limits the number of steps. ``sequences`` limits the number of sequences that the run trains on. None: no limit.
    """

    steps: int | None = None
    sequences: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Settings of the checkpoints from which a run can resume."""

    folder: Path
    every: Frequency  # when checkpoints are written
    newest: int | None = None  # number of newest checkpoints to keep; None: all
    best: bool = False  # whether to also keep the checkpoint with the best evaluation
    enabled: bool = True  # False: checkpoints are neither written nor read
    saves_optimizer: bool = True  # whether checkpoints contain the optimizer state
    loads_optimizer: bool = True  # whether resuming restores the optimizer state
    strict: bool = False  # reject checkpoints without a manifest, and files of other users or writable by all users
    remedy: str = "free some space, or keep fewer checkpoints"  # advice when the disk is full


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Settings of one training run.

    Attributes:
        evaluated_with: settings of the evaluations. Two evaluations are comparable if these settings are equal.
    """

    span: Span
    evaluation: Frequency
    checkpoints: CheckpointSpec
    patience: int | None = None  # end the run after this many consecutive evaluations without a new best; None: never
    evaluated_with: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False  # whether the run continues an earlier attempt in the same folder
