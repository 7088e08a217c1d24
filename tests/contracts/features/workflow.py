"""A workflow for the runs of ``test_driven``."""

from __future__ import annotations

from typing import Any

from areno.config.experiment import GenerationHyperparameters
from areno.rollouts.conversation.trajectory_rows import completion_row
from areno.rollouts.engine_client import ModelRequest
from areno.rollouts.trajectory import make_trajectory
from areno.rollouts.workflows.base import RolloutWorkflow


class Quarter(RolloutWorkflow):
    """One answer per episode, always with the same reward."""

    def __init__(self, gconfig: Any = None, tokenizer: Any = None) -> None:
        self.gconfig = gconfig or GenerationHyperparameters(max_new_tokens=6, max_tokens=128)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        prompt = engine.tokenizer(data["prompt"])["input_ids"]
        answer = await engine.agenerate(ModelRequest(prompt, self.gconfig))
        return make_trajectory([(completion_row(prompt, answer.sequence), 0.25)])
