"""Data structures of the dispatcher: tasks, batches, and a watchdog that stops a run after too many rejected episodes."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from areno.errors import AgentError, ArenoError, UsageError
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.staleness import oldest_version
from areno.rollouts.trajectory import Trajectory

Accept = Callable[[Trajectory], Any]
OnStale = Literal["regenerate", "drop"]
Rejection = Literal["raised an error", "returned None", "rejected by the filter"]


class RolloutStoppedError(ArenoError):
    """Too many consecutive episodes failed or were rejected, or an episode raised an error listed in ``stops_on``."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """The workflow that turns data rows into trajectories, and a filter for these trajectories. Without a filter, all
    trajectories are accepted."""

    workflow: Any
    should_accept_fn: Accept | None = None


@dataclass(slots=True, eq=False)
class EpisodeTask:
    """One data row and its episode."""

    id: int
    data: dict[str, Any]
    plan: EpisodePlan | None = None  # None until a batch is requested
    order: int = -1  # index in the order of starts; -1 before the start
    began_s: float = 0.0  # time of the start
    future: Future[Trajectory] | None = None  # future of the episode's coroutine
    trajectory: Trajectory | None = None  # the result; None for a rejected episode, which only dynamic batches keep
    cancelled: bool = False

    def cancel(self) -> None:
        """Mark the task as cancelled. If its episode has started, cancel the episode."""
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()

    async def run(self, client: EngineClient) -> Any:
        """Run the workflow, and return its result.

        Raises:
            AgentError: the workflow cancelled its own episode. Only :meth:`cancel` may cancel an episode.
        """
        assert self.plan is not None
        try:
            return await self.plan.workflow.arun_episode(client, self.data)
        except asyncio.CancelledError as error:
            if self.cancelled:
                raise
            raise AgentError("the workflow cancelled its own episode (CancelledError)") from error


class Rejected(Exception):  # noqa: N818  (an outcome, not an error)
    """Raised if an episode is rejected. The argument is the reason (a :data:`Rejection`)."""


@dataclass(slots=True)
class Batch:
    """The trajectories of a training step."""

    trajectories: list[Trajectory]  # one per prompt group
    task_ids: list[int]  # the task of each group
    data: list[dict[str, Any]]  # the data row of each group
    version: int  # current weight version
    staleness: list[int]  # current version minus the version of the oldest token, per group
    rejected: int = 0  # number of rejected episodes; a dynamic batch counts them towards its size

    @classmethod
    def of(cls, tasks: Sequence[EpisodeTask], version: int) -> Batch:
        """Make a batch of finished tasks, in the order of ``tasks``."""
        used = [(task, task.trajectory) for task in tasks if task.trajectory is not None]
        oldest = [oldest_version(trajectory) for _, trajectory in used]
        return cls(
            trajectories=[trajectory for _, trajectory in used],
            task_ids=[task.id for task, _ in used],
            data=[task.data for task, _ in used],
            version=version,
            staleness=[version - tokens if tokens is not None else 0 for tokens in oldest],
            rejected=len(tasks) - len(used),
        )


@dataclass(slots=True)
class Watchdog:
    """Stops a run after too many consecutive failed or rejected episodes, or at the first error of a type in ``stops_on``."""

    max_errors: int
    max_rejections: int
    stops_on: tuple[type[BaseException], ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    errors_in_a_row: int = 0
    first_error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.max_errors < 1 or self.max_rejections < 1:
            raise UsageError(
                f"max_errors_in_a_row and max_rejections_in_a_row must both be at least 1, got {self.max_errors} and "
                f"{self.max_rejections}"
            )

    def accepted(self) -> None:
        """Record an accepted episode: set the numbers of consecutive errors and rejections to 0, and forget the first error."""
        self.counts, self.errors_in_a_row, self.first_error = {}, 0, None

    def rejected(self, kind: Rejection, error: BaseException | None = None) -> RolloutStoppedError | None:
        """Count a failed or rejected episode, and return an error if the run must stop. None if the run continues."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.errors_in_a_row = self.errors_in_a_row + 1 if error is not None else 0
        self.first_error = self.first_error or error
        if error is not None and isinstance(error, self.stops_on):
            return _stopped(f"the run stops because an episode raised {type(error).__name__}: {error}", error)
        rejected = sum(self.counts.values())
        if self.errors_in_a_row < self.max_errors and rejected < self.max_rejections:
            return None
        what = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        text = f"the last {rejected} episodes were all dropped ({what}), so there is nothing to train on"
        if self.first_error is None:
            return _stopped(
                f"{text}; check the reward function and the trajectory filter, and check that the model can solve the tasks",
                None,
            )
        shown = "".join(traceback.format_exception(self.first_error))
        return _stopped(f"{text}. The first exception was:\n{shown}", self.first_error)


def _stopped(text: str, cause: BaseException | None) -> RolloutStoppedError:
    error = RolloutStoppedError(text)
    error.__cause__ = cause
    return error
