"""Groups of episodes of one workflow, each group a future: what ``--workflow`` runs."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

from areno.rollouts.engine_client import EPISODE, EngineClient, Episode
from areno.rollouts.pool import EpisodeLoop
from areno.rollouts.trajectory import samples_of
from areno.rollouts.workflows.base import RolloutWorkflow, as_trajectory

_CLOSE_S = 30.0

SampleRows = list[dict[str, Any]]
"""The rows of one sample as plain lists, see :func:`areno.rollouts.trajectory.samples_of`; empty where it was left out."""


class Episodes:
    """Runs a workflow; to be closed."""

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
