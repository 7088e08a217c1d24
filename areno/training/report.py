"""What a run tells while it goes on. Each front end has its own names and log lines; health and display are the same."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any, ClassVar

from areno.observability.display import ProgressDisplay, create_progress
from areno.observability.health import HealthMonitor, unusable
from areno.storage.run_dir import RunDirectory
from areno.training.frequency import StepInfo
from areno.training.state import RunState
from areno.types import TrainSequence


@dataclass(slots=True)
class StepOutcome:
    """What one step produced.

    Attributes:
        timings: seconds of ``rollout``, ``reward``, ``advantage``, ``train``, where they apply.
    """

    rows: Sequence[TrainSequence]  # rows that were trained on
    stats: dict[str, float]  # scalar statistics
    timings: dict[str, float] = field(default_factory=dict)
    rewards: list[float] | None = None  # one per kept sample; None without rewards
    groups: list[int] | None = None  # prompt index of each of these samples
    sample: str | None = None  # one completion to show
    skipped_long: int = 0  # over-long prompts passed over for this step
    sequences: float | None = None  # trained sequences; None counts the rows
    seconds: float = 0.0  # that the step took


class Reporter(ABC):
    """Tells the steps and evaluations of a run: ``display`` shows progress, ``health`` warns of what cannot learn."""

    joins_evaluation: ClassVar[bool]
    """Whether the numbers of an evaluation belong to the record of the step before it; else they have one of their own."""

    def __init__(self, run_dir: RunDirectory, logger: Logger, health: HealthMonitor) -> None:
        self.run_dir, self.logger, self.health = run_dir, logger, health
        self.display: ProgressDisplay = create_progress()

    @abstractmethod
    def record_step(self, at: StepInfo, outcome: StepOutcome, state: RunState) -> None:
        """Write the numbers of a step; the totals of ``state`` hold it."""

    @abstractmethod
    def record_evaluation(self, state: RunState, metrics: Mapping[str, float], *, again: bool = False) -> None:
        """Write the numbers of an evaluation that belongs to no step's record; ``again`` after their line was dropped."""

    @abstractmethod
    def rewind(self, state: RunState) -> None:
        """Drop what was written after the last step of a resumed run; before the first step, all."""

    def begin(self, total_steps: int, done_steps: int) -> None:
        """Show that a run of so many steps begins, of which earlier attempts have done some."""
        self.display.start(total_steps, done_steps)

    def known_stats(self, outcome: StepOutcome) -> Mapping[str, float]:
        """The statistics of a step under the names that health monitor and display know."""
        return outcome.stats

    def observe(self, step: int, outcome: StepOutcome) -> bool:
        """Warn where a finished step shows that the run cannot learn; returns whether the update was usable."""
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
        if note := self.health.explain(step, known, outcome.rewards or []):
            self.logger.info(note)
        return not unusable(known)

    def show(self, step: int, outcome: StepOutcome) -> None:
        """Show a finished step."""
        self.display.step_done(step, self.known_stats(outcome), outcome.sample)

    @contextmanager
    def writing(self, path: Path, state: RunState) -> Iterator[None]:
        """A block that writes a checkpoint."""
        self.display.phase("save")
        yield

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing)
        """Undo :meth:`state_dict`."""

    def close(self) -> None:
        """Write what is still queued; a second call does nothing."""
        self.display.stop()
