"""Agents: programs that call the model at an OpenAI-compatible endpoint. Training uses the model's responses.

- ``data``: tasks, batches of tasks, and what an agent returns; ``context``: the URL and API keys passed to an agent.
- ``lint``: checks chat templates for multi-turn training.
- ``collect``: runs an agent with timeouts and retries, and reports the error of each failed sample.
- ``samples``: converts the turns that an agent returns to training rows and reward records.
- ``conversation_loop``: runs the turns and tools of an environment (``converse``).
- ``environment``: creates an agent and a reward function from an environment; ``tools``: Python functions as tools.
- ``demonstrations``: creates rows for SFT from the answers of an expert.

:mod:`areno.rollouts.conversation` serves the model and records the tokens of every turn.
"""

import importlib
from typing import Any

_MODULE_OF = {
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

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'areno.api.agentic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
