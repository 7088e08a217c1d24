"""Reports the progress of a run.

``areno train`` and ``areno run`` have separate subclasses, because their log lines and their names of statistics differ.
"""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any, ClassVar

from areno.observability.display import ProgressDisplay, create_progress
from areno.observability.environment import environment
from areno.observability.health import HealthMonitor, unusable
from areno.observability.screen import RunHeading, ShownSample
from areno.reports.report import ReportRefresher
from areno.storage.run_dir import RunDirectory
from areno.training.frequency import StepInfo
from areno.training.state import RunState
from areno.types import TrainSequence, part_columns


@dataclass(slots=True)
class StepOutcome:
    """The result of one step.

    Attributes:
        timings: seconds per phase: ``rollout``, ``reward``, ``advantage`` and ``train``. Supervised steps have fewer phases.
        memory: memory statistics from :class:`~areno.observability.step_memory.StepMemory`.
    """

    rows: Sequence[TrainSequence]  # trained rows
    stats: dict[str, float]  # scalar statistics
    timings: dict[str, float] = field(default_factory=dict)
    rewards: list[float] | None = None  # reward of each kept sample; None without rewards
    groups: list[int] | None = None  # prompt index of each kept sample
    sample: ShownSample | None = None  # a sample to show
    skipped_long: int = 0  # over-long prompts skipped for this step
    sequences: float | None = None  # number of trained sequences; None: the number of rows
    seconds: float = 0.0  # duration of the step
    memory: dict[str, float] = field(default_factory=dict)


class Reporter(ABC):
    """Reports the steps and evaluations of a run.

    ``display`` shows the progress. ``health`` warns if training is failing. ``html_report`` rewrites the report of the run
    directory.
    """

    joins_evaluation: ClassVar[bool]
    """Whether the metrics of an evaluation are added to the record of the preceding step, instead of a separate record."""

    def __init__(
        self, run_dir: RunDirectory, logger: Logger, health: HealthMonitor, algorithm: str = "", model: str = ""
    ) -> None:
        self.run_dir, self.logger, self.health = run_dir, logger, health
        self.heading = RunHeading(algorithm, model, str(run_dir.path), health.gap_limit)
        self.display: ProgressDisplay = create_progress()
        self.html_report = ReportRefresher(run_dir)

    @abstractmethod
    def record_step(self, at: StepInfo, outcome: StepOutcome, state: RunState) -> None:
        """Write the statistics of a step. The totals in ``state`` already include this step."""

    @abstractmethod
    def record_evaluation(self, state: RunState, metrics: Mapping[str, float], *, again: bool = False) -> None:
        """Write the metrics of an evaluation as a record.

        If ``again`` is true, the evaluation was made before the run was resumed, and resuming has deleted the record of the
        evaluation.
        """

    @abstractmethod
    def rewind(self, state: RunState) -> None:
        """Keep the records of the first ``state.step`` steps, which are completed, and delete the records of later steps.

        If ``state.step`` is 0, all records are deleted.
        """

    def begin(self, total_steps: int, done_steps: int, data: Mapping[str, int]) -> None:
        """Write ``environment.json``, and show the start of the run.

        Of the ``total_steps`` steps, ``done_steps`` are already completed. ``data`` contains the sizes of the run's data for
        ``environment.json``; {} if the sizes are unknown.
        """
        self.run_dir.write_environment({**environment(), **({"data": data} if data else {})})
        self.display.start(total_steps, done_steps, self.heading)

    def known_stats(self, outcome: StepOutcome) -> Mapping[str, float]:
        """Return the statistics of a step, under the names that the health monitor uses."""
        return outcome.stats

    def shown_stats(self, outcome: StepOutcome) -> Mapping[str, float]:
        """Return the statistics of a step, under the names that the display uses."""
        return self.known_stats(outcome)

    def observe(self, step: int, outcome: StepOutcome) -> bool:
        """Warn if a finished step shows that training is failing. Return False if the update was skipped or not finite."""
        known, has_rewards = self.known_stats(outcome), outcome.rewards is not None
        groups = [row.group for row in outcome.rows] if outcome.groups is None else outcome.groups
        for warning in self.health.observe(
            step,
            known,
            rewards=outcome.rewards or [],
            groups=groups if has_rewards else [],
            truncated=[row.truncated for row in outcome.rows] if has_rewards else [],
        ):
            self.display.warn(warning)
            self.run_dir.append_warning(step, warning)
        if note := self.health.explain(step, known, outcome.rewards or []):
            self.logger.info(note)
        return not unusable(known)

    def show(self, step: int, outcome: StepOutcome) -> None:
        """Show a finished step on the display."""
        parts = {name: statistics.fmean(column) for name, column in part_columns(outcome.rewards or []).items()}
        self.display.step_done(step, self.shown_stats(outcome), outcome.sample, parts)

    @contextmanager
    def writing(self, path: Path, state: RunState) -> Iterator[None]:
        """Show on the display that the ``with`` block writes a checkpoint."""
        self.display.phase("save")
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the reporter for a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing)
        """Restore the state that :meth:`state_dict` returned."""

    def close(self) -> None:
        """Stop the display. A second call does nothing."""
        self.display.stop()
