"""Reward of a kit; see ``Shopping`` in ``shopping.py``."""

from __future__ import annotations

from shopping import Shopping

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(Shopping)
