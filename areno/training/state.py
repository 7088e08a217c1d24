"""How far a run has come: everything besides weights and optimizer that an exact resume needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno.errors import DamagedCheckpointError
from areno.storage.contents import read_state


@dataclass(slots=True)
class RunState:
    """Position of a run after its last completed step.

    Attributes:
        evaluation: the last one: ``step``, ``metrics``, and the ``settings`` under which others are comparable with it.
        parts: counters of the parts of a run by name, as JSON has them: frequencies, data position, statistics.
    """

    step: int = 0  # completed steps
    epoch: int = 0  # current epoch, from 0
    epoch_step: int = 0  # completed steps of this epoch
    position: int = 0  # rows of this epoch's order that are done with, skipped ones included
    sequences: float = 0.0  # trained sequences since the run began
    skipped_long: int = 0  # over-long prompts passed over since the run began
    health: dict[str, Any] = field(default_factory=dict)  # state of the health monitor
    rng: dict[str, Any] = field(default_factory=dict)  # state of the global random generators
    unusable: int | None = None  # completed steps before the first update that was not usable; None if all were
    evaluation_due: bool = False  # the evaluation after the last step has yet to be done
    evaluation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None  # the best evaluation so far: ``step``, ``metric``, ``value``
    not_best: int = 0  # evaluations since the best one
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunState:
        """The state that a checkpoint was written with; :class:`DamagedCheckpointError` if it cannot be used."""
        found = read_state(checkpoint)
        try:
            return cls(**found)
        except TypeError as error:
            raise DamagedCheckpointError(f"the state of {checkpoint} is not one of this version ({error})") from error
