"""The interface of workflows; groups, several episodes of one row that are judged together; and what runs them."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from areno.errors import UsageError
from areno.rollouts.conversation.rows import TrajectoryRow
from areno.rollouts.engine_client import EPISODE, EngineClient, Episode
from areno.rollouts.pool import EpisodeLoop
from areno.rollouts.trajectory import Trajectory, check_trajectory, make_trajectory, samples_of, stack

logger = logging.getLogger(__name__)

_CLOSE_S = 30.0

SampleRows = list[dict[str, Any]]
"""The rows of one sample as plain lists, see :func:`areno.rollouts.trajectory.samples_of`; empty where it was left out."""


@dataclass(slots=True)
class Interaction:
    """One answer, or a whole conversation of them, as a training row."""

    id: str  # the client's name of the answer; of the last one in a conversation
    row: TrajectoryRow
    reward: float  # after discounting
    messages: list[dict[str, Any]]  # what the answer was given, and the answer
    num_turns: int  # answers in the whole session


EpisodeResult = Trajectory | dict[str, Interaction] | None
"""None leaves the episode out; tensors as in :mod:`areno.rollouts.trajectory`; or interactions by name."""


class RolloutWorkflow(ABC):
    """One episode as one coroutine.

    An exception leaves the episode out, is counted and shown. Episodes of all rows run in one event loop, so a workflow
    must await what takes long, and must not block.
    """

    @abstractmethod
    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """Run one sample of a data row, which episodes must not change; ``engine`` gives tokens."""

    async def arun_group(self, engine: EngineClient, data: dict[str, Any], samples: int) -> Sequence[EpisodeResult]:
        """Run several samples of a row; a workflow that can share work between them has its own way."""
        return await run_samples(samples, lambda: self.arun_episode(engine, dict(data)))

    async def aclose(self) -> None:  # noqa: B027  (most start nothing)
        """End what the workflow has started; called once, when no episode of it runs any more."""


async def run_samples(samples: int, episode: Any) -> list[EpisodeResult]:
    """Run copies of an episode at the same time, each with draws of its own; raises the first error when all have ended."""
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
    """Several samples of each row, judged as one group.

    With ``drop_incomplete`` a group is left out when one of its samples was left out (returned None); otherwise it goes on
    with the others, as a smaller group of its own.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int, drop_incomplete: bool = False) -> None:
        if group_size < 1:
            raise UsageError(f"gconfig.n_samples must be at least 1, got {group_size}")
        self.workflow, self.group_size, self.drop_incomplete = workflow, group_size, drop_incomplete

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """All samples of a row, as the rows of one trajectory."""
        results = await self.workflow.arun_group(engine, data, self.group_size)
        kept = [found for result in results if (found := as_trajectory(result)) is not None]
        if len(kept) < len(results):
            what = "the group is left out" if self.drop_incomplete or not kept else "the group goes on without them"
            logger.warning("%d of %d samples of a row were left out; %s", len(results) - len(kept), len(results), what)
        if not kept or (self.drop_incomplete and len(kept) < len(results)):
            return None
        return stack(kept)

    async def aclose(self) -> None:
        """End what the inner workflow has started."""
        await self.workflow.aclose()


def as_trajectory(result: Any, check: bool = False) -> Trajectory | None:
    """What a workflow has returned, as tensors; None where it left the episode out, also by an empty mapping.

    With ``check`` every key, shape and number is looked at. Raises UsageError: it is no :data:`EpisodeResult`, or the
    check failed.
    """
    if result is None or (isinstance(result, dict) and not result):
        return None
    if isinstance(result, dict) and all(isinstance(value, Interaction) for value in result.values()):
        trajectory = make_trajectory([(found.row, found.reward) for found in result.values()])
        return {**trajectory, "num_turns": torch.tensor([found.num_turns for found in result.values()])}
    if check or not isinstance(result, dict) or "input_ids" not in result:
        check_trajectory(result)
    return result


class Episodes:
    """Runs groups of episodes of one workflow, each group a future: what ``--workflow`` runs; to be closed."""

    def __init__(self, workflow: RolloutWorkflow, client: EngineClient) -> None:
        self._workflow, self._client = workflow, client
        self._loop = EpisodeLoop()

    def start(self, number: int, data: dict[str, Any], samples: int) -> Future[list[SampleRows]]:
        """Run several samples of a data row; the future has one entry per sample, or what an episode raised.

        Draws derive from the group's ``number``.
        """
        return self._loop.start(self._run(number, data, samples))

    async def _run(self, number: int, data: dict[str, Any], samples: int) -> list[SampleRows]:
        EPISODE.set(Episode(number))
        results = await self._workflow.arun_group(self._client, data, samples)
        trajectories = [as_trajectory(result, check=True) for result in results]
        return [[] if trajectory is None else list(samples_of(trajectory)) for trajectory in trajectories]

    def close(self) -> None:
        """Cancel what runs, and end what the workflow has started."""
        with contextlib.suppress(TimeoutError):  # an episode blocks the loop, which then reports it
            self._loop.start(self._workflow.aclose()).result(_CLOSE_S)
        self._loop.close()
