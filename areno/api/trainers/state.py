"""How far a run has come: everything besides weights and optimizer that an exact resume needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """Position of a run after its last completed step.

    Attributes:
        step: completed steps.
        epoch: current epoch, from 0.
        position: rows of this epoch's order that are done with, skipped ones included.
        skipped_long: over-long prompts passed over since the run began.
        health: state of the health monitor.
        rng: state of the global random generators.
        evaluation: the last evaluation: ``step`` (completed steps of the model that was measured), ``metrics``, and the
            ``settings`` under which others are comparable with it.
        unusable: completed steps before the first update that was not usable; None if all were.
        best: the best evaluation so far: ``step``, ``metric``, ``value``.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    skipped_long: int = 0
    health: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    unusable: int | None = None
    evaluation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Progress:
        """Undo :meth:`to_json`."""
        return cls(**state)
