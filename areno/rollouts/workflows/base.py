"""Defines the interface of workflows, groups the samples of a data row, and runs the workflow that ``--workflow`` selects."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from areno.errors import UsageError
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow
from areno.rollouts.engine_client import EPISODE, EngineClient, Episode
from areno.rollouts.episode_thread import EpisodeLoop
from areno.rollouts.trajectory import Trajectory, check_trajectory, make_trajectory, samples_of, stack

logger = logging.getLogger(__name__)


SampleRows = list[dict[str, Any]]
"""The rows of a sample, as in :func:`areno.rollouts.trajectory.samples_of`. Empty if the sample was rejected."""


@dataclass(slots=True)
class Interaction:
    """One answer, or all answers of a conversation, as a training row."""

    id: str  # response id of the answer, or of the last one in a conversation
    row: TrajectoryRow
    reward: float  # discounted return
    messages: list[dict[str, Any]]  # the prompt messages and the answer
    num_turns: int  # number of answers in the session


EpisodeResult = Trajectory | dict[str, Interaction] | None
"""Result of an episode: tensors (see :mod:`areno.rollouts.trajectory`) or interactions by name; None if the episode is
rejected."""


class RolloutWorkflow(ABC):
    """Runs episodes as coroutines in a shared event loop. An episode must not block. If an episode fails, its group is
    dropped."""

    @abstractmethod
    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """Use ``engine`` to generate one sample for a data row. The row must not be modified."""

    async def arun_group(self, engine: EngineClient, data: dict[str, Any], samples: int) -> Sequence[EpisodeResult]:
        """Generate several samples for a data row. A subclass may override this method to share work between samples."""
        return await run_samples(samples, lambda: self.arun_episode(engine, dict(data)))

    async def aclose(self) -> None:  # noqa: B027  (most start nothing)
        """Release the workflow's resources. Called once; no episode starts afterwards."""


async def run_samples(samples: int, episode: Any) -> list[EpisodeResult]:
    """Run an episode several times concurrently, with different seeds. If an episode fails, the other episodes continue, and
    the first error is raised when all episodes have ended."""
    group = EPISODE.get() or Episode(-1)

    async def run(index: int) -> EpisodeResult:
        EPISODE.set(Episode(group.task_id, index))
        return await episode()

    tasks = [asyncio.create_task(run(index)) for index in range(samples)]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Combines the samples of each data row into one group. Rejected samples are omitted."""

    def __init__(self, workflow: RolloutWorkflow, group_size: int) -> None:
        if group_size < 1:
            raise UsageError(f"gconfig.n_samples must be at least 1, got {group_size}")
        self.workflow, self.group_size = workflow, group_size

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """Generate all samples for the data row ``data``. Return one trajectory with the training rows of all accepted samples.

        If all samples were rejected, return None.
        """
        results = await self.workflow.arun_group(engine, data, self.group_size)
        accepted = [trajectory for result in results if (trajectory := as_trajectory(result)) is not None]
        if dropped := len(results) - len(accepted):
            what = "the group continues without these samples" if accepted else "the group is dropped"
            logger.warning("%d of %d samples of a row were rejected; %s", dropped, len(results), what)
        return stack(accepted) if accepted else None

    async def aclose(self) -> None:
        """See :meth:`RolloutWorkflow.aclose`."""
        await self.workflow.aclose()


def as_trajectory(result: Any, check: bool = False) -> Trajectory | None:
    """Convert the result of an episode to tensors. Return None for a rejected episode, whose result is None or has no rows.

    With ``check``, the keys, shapes and values of tensors are checked.

    Raises:
        UsageError: the result is not an :data:`EpisodeResult`, or the check failed.
    """
    if result is None or (isinstance(result, dict) and not result):
        return None
    if isinstance(result, dict) and all(isinstance(value, Interaction) for value in result.values()):
        interactions = result.values()
        trajectory = make_trajectory([(interaction.row, interaction.reward) for interaction in interactions])
        return {**trajectory, "num_turns": torch.tensor([interaction.num_turns for interaction in interactions])}
    if check or not isinstance(result, dict) or "input_ids" not in result:
        check_trajectory(result)
    return result if len(result["input_ids"]) else None


class Episodes:
    """Runs groups of episodes of the workflow that ``--workflow`` selects. Each group has a future.

    The caller must call :meth:`close`.
    """

    def __init__(self, workflow: RolloutWorkflow, client: EngineClient) -> None:
        self._workflow, self._client = workflow, client
        self._loop = EpisodeLoop()

    def start(self, number: int, data: dict[str, Any], samples: int) -> Future[list[SampleRows]]:
        """Generate a group of samples for a data row. Seeds are derived from ``number``, the number of the group.

        The future returns one entry per sample. If generating a sample fails, the future raises the error instead.
        """
        return self._loop.start(self._run(number, data, samples))

    async def _run(self, number: int, data: dict[str, Any], samples: int) -> list[SampleRows]:
        EPISODE.set(Episode(number))
        results = await self._workflow.arun_group(self._client, data, samples)
        trajectories = [as_trajectory(result, check=True) for result in results]
        return [[] if trajectory is None else list(samples_of(trajectory)) for trajectory in trajectories]

    def close(self) -> None:
        """Release the workflow's resources, and cancel running episodes."""
        self._loop.close([self._workflow])
