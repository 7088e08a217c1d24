"""What the dispatcher tracks: rows on their way, batches, and runs of rejections that must end a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from areno.errors import ArenoError, UsageError
from areno.rollouts.staleness import oldest_version
from areno.rollouts.trajectory import Trajectory

Accept = Callable[[Trajectory], Any]
OnStale = Literal["regenerate", "drop"]
Rejection = Literal["raised", "returned None", "was refused by the filter"]


class RolloutStoppedError(ArenoError):
    """No usable episodes come any more; the message has the first cause."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with rows: the workflow, and which of its trajectories are kept (None keeps all)."""

    workflow: Any
    should_accept_fn: Accept | None = None


@dataclass(slots=True, eq=False)
class Task:
    """One row on its way."""

    id: int
    data: dict[str, Any]
    plan: Plan | None = None  # what is done with it; None until a batch is asked for
    order: int = -1  # when it began, among all; ``began_s`` is the same on the clock
    began_s: float = 0.0
    future: Future[Trajectory] | None = None  # of its coroutine
    trajectory: Trajectory | None = None  # what it gave; None where it was rejected, which only dynamic batches keep


class Rejected(Exception):  # noqa: N818  (a verdict, and no error)
    """An episode is left out; its one argument is a :data:`Rejection`."""


@dataclass(slots=True)
class Batch:
    """What a training step uses."""

    trajectories: list[Trajectory]  # one per prompt group, in random order; ``task_ids`` are of the same groups
    task_ids: list[int]
    version: int  # of the weights that are to be trained
    staleness: list[int]  # for each group, how many versions its oldest token is behind
    rejected: int = 0  # episodes that a dynamic batch counts in their place

    @classmethod
    def of(cls, tasks: Sequence[Task], version: int) -> Batch:
        """The batch of finished tasks, in their order."""
        used = [(task.id, task.trajectory) for task in tasks if task.trajectory is not None]
        oldest = [oldest_version(trajectory) for _, trajectory in used]
        return cls(
            trajectories=[trajectory for _, trajectory in used],
            task_ids=[name for name, _ in used],
            version=version,
            staleness=[version - one if one is not None else 0 for one in oldest],
            rejected=len(tasks) - len(used),
        )


@dataclass(slots=True)
class Watchdog:
    """Ends a run whose episodes are all rejected, or at the first error that it ``stops_on``."""

    max_errors: int
    max_rejections: int
    stops_on: tuple[type[BaseException], ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    errors_in_a_row: int = 0
    first_error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.max_errors < 1 or self.max_rejections < 1:
            raise UsageError(
                f"max_errors_in_a_row ({self.max_errors}) and max_rejections_in_a_row ({self.max_rejections}) must be at "
                "least 1"
            )

    def accepted(self) -> None:
        """An episode was kept."""
        self.counts, self.errors_in_a_row, self.first_error = {}, 0, None

    def rejected(self, kind: Rejection, error: BaseException | None = None) -> RolloutStoppedError | None:
        """An episode was left out; returns what must end the run, if it must end."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.errors_in_a_row = self.errors_in_a_row + 1 if error is not None else 0
        self.first_error = self.first_error or error
        if error is not None and isinstance(error, self.stops_on):
            return _stopped(f"the run stops at its first {type(error).__name__}: {error}", error)
        rejected = sum(self.counts.values())
        if self.errors_in_a_row < self.max_errors and rejected < self.max_rejections:
            return None
        what = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        text = f"the last {rejected} episodes were all left out ({what}), so there is nothing to train on"
        if self.first_error is None:
            return _stopped(f"{text}; look at the filter, at the rewards, and at rows that the model can solve", None)
        shown = "".join(traceback.format_exception(self.first_error))
        return _stopped(f"{text}. The first exception was:\n{shown}", self.first_error)


def _stopped(text: str, cause: BaseException | None) -> RolloutStoppedError:
    error = RolloutStoppedError(text)
    error.__cause__ = cause
    return error
