"""What an answer is worth: 1.0 right, 0.0 wrong, -1.0 none."""

from __future__ import annotations

from calculator import Calculator

from areno.api.agentic.environment import environment_reward

reward_fn = environment_reward(Calculator)
