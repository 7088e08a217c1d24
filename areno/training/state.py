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
        step: completed steps.
        epoch: current epoch, from 0.
        epoch_step: completed steps of this epoch.
        position: rows of this epoch's order that are done with, skipped ones included.
        sequences: trained sequences since the run began.
        skipped_long: over-long prompts passed over since the run began.
        health: state of the health monitor.
        rng: state of the global random generators.
        unusable: completed steps before the first update that was not usable; None if all were.
        evaluation_due: the evaluation after the last step has yet to be done.
        evaluation: the last one: ``step``, ``metrics``, and the ``settings`` under which others are comparable with it.
        best: the best evaluation so far: ``step``, ``metric``, ``value``.
        not_best: evaluations since the best one.
        parts: counters of the parts of a run by name, as JSON has them: frequencies, data position, statistics.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    position: int = 0
    sequences: float = 0.0
    skipped_long: int = 0
    health: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    unusable: int | None = None
    evaluation_due: bool = False
    evaluation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    not_best: int = 0
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunState:
        """The state that a checkpoint was written with; :class:`DamagedCheckpointError` if it cannot be used."""
        found = read_state(checkpoint)
        try:
            return cls(**found)
        except TypeError as error:
            raise DamagedCheckpointError(f"the state of {checkpoint} is not one of this version ({error})") from error
