"""Reward of a duel; see ``turn_reward`` and ``DuelGrid`` in ``duel_environment.py``."""

from __future__ import annotations

from duel_environment import DuelGrid

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(DuelGrid)
