"""Reward of a kit: 1.0 right, 0.5 right but with a skipped step, 0.4 too expensive, -0.5 wrong, -1.0 nothing submitted."""

from __future__ import annotations

from shopping import Shopping

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(Shopping)
