"""Where a step's metrics go: TensorBoard events and the run directory's ``metrics.jsonl``, the same scalars in both.

Importing this module does not import torch; the event writer does it in a thread of its own at the first step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno.observability.scalars import step_scalars
from areno.observability.services import ServiceGroup
from areno.observability.tensorboard import EventWriter
from areno.storage.run_dir import RunDirectory


class MetricsRecorder:
    """Records every step's ``rollout/*``, ``train/*`` and ``time/*`` scalars.

    Args:
        log_dir: folder of the TensorBoard events; None writes none.
        run_dir: its ``metrics.jsonl`` gets one object per step; None writes none.
        purge_step: on resume, the first step that will be recorded again.
        services: tracking services that get the same scalars.
    """

    def __init__(
        self,
        log_dir: str | Path | None,
        run_dir: RunDirectory | None = None,
        purge_step: int | None = None,
        services: ServiceGroup | None = None,
    ) -> None:
        self._services = services
        self._events = EventWriter(log_dir, purge_step) if log_dir is not None else None
        self._run_dir = run_dir

    def record_step(self, step: int, **values: Any) -> dict[str, float]:
        """Record one step, and return its scalars by tag; values are :func:`areno.observability.scalars.step_scalars`'s.

        Raises ArenoError: the events or ``metrics.jsonl`` cannot be written.
        """
        scalars = step_scalars(**values)
        self.record_scalars(step, scalars)
        return scalars

    def record_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record scalars by full tag, as a line of their own; an evaluation's ``step`` counts the completed steps.

        Raises ArenoError: the events or ``metrics.jsonl`` cannot be written.
        """
        if self._run_dir is not None:
            self._run_dir.append_metrics(step, scalars)
        if self._events is not None:
            self._events.write(step, scalars, time.time())
        if self._services is not None:
            self._services.log(step, scalars)

    def close(self) -> None:
        """Write what is still queued; a second call does nothing. Raises ArenoError: the events could not be written."""
        if self._services is not None:
            self._services.close()
        if self._events is not None:
            self._events.close()
