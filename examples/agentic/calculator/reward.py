"""Reward of an answer: 1.0 for the right number, 0.0 for a wrong number, and -1.0 without a number."""

from __future__ import annotations

from calculator import Calculator

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(Calculator)
