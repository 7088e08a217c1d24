"""Agents: programs that talk to an OpenAI-compatible endpoint, and are trained by what they said there.

The way of the data, and where to find it:

- ``data``: tasks, batches of them, and what an agent returns; ``context``: address and keys that an agent is given.
- ``lint``: what a chat template will do to a conversation.
- ``collect``: running an agent with deadlines, retries, and errors that stay with their sample.
- ``samples``: from returned turns to training rows and reward records; :mod:`areno.rollouts.conversation` serves the model
  and records the tokens of every turn.
- ``environment``, ``tools`` and ``demonstrations``: games and tasks as classes, with no agent code.
"""

import importlib
from typing import Any

_HOMES = {
    "AgentBatch": "areno.api.agentic.data",
    "AgentContext": "areno.api.agentic.context",
    "AgentItem": "areno.api.agentic.data",
    "AgentSample": "areno.api.agentic.samples",
    "AgentTrajectory": "areno.api.agentic.data",
    "AgentTrajectoryTurn": "areno.api.agentic.data",
    "LossMaskPolicy": "areno.rollouts.conversation.spans",
    "RewardEvent": "areno.types",
    "RewardRecord": "areno.types",
    "RolloutSession": "areno.api.session",
    "TrajectoryRow": "areno.rollouts.conversation.trajectory_rows",
    "lint_chat_template": "areno.api.agentic.lint",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'areno.api.agentic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
