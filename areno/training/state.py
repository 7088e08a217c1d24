"""The progress of a run, with random states and counters. An exact resume also needs the weights and the optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno.errors import DamagedCheckpointError
from areno.storage.contents import read_state


@dataclass(slots=True)
class RunState:
    """The position of a run after its last completed step.

    Attributes:
        evaluation: ``step``, ``metrics`` and ``settings`` of the last evaluation. Two evaluations are comparable if their
            settings are equal.
        parts: state of each component as JSON values, by name of the component, such as ``evaluation`` or ``saver``.
    """

    step: int = 0  # completed steps
    epoch: int = 0  # current epoch, from 0
    epoch_step: int = 0  # completed steps of this epoch
    position: int = 0  # consumed rows of this epoch's order, including skipped ones
    sequences: float = 0.0  # trained sequences since the start of the run
    skipped_long: int = 0  # over-long prompts skipped since the start of the run
    health: dict[str, Any] = field(default_factory=dict)  # state of the health monitor
    rng: dict[str, Any] = field(default_factory=dict)  # state of the global random number generators
    unusable: int | None = None  # number of steps completed before the first unusable update; None if there was none
    evaluation_due: bool = False  # whether the evaluation after the last step is still pending
    evaluation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None  # the best evaluation so far: ``step``, ``metric``, ``value``
    not_best: int = 0  # number of evaluations since the best one
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunState:
        """Read the run state in a checkpoint. Raises DamagedCheckpointError if the run state is unusable."""
        fields = read_state(checkpoint)
        try:
            return cls(**fields)
        except TypeError as error:
            raise DamagedCheckpointError(
                f"the state of {checkpoint} has missing or unknown fields ({error})"
            ) from error
