"""Runs reward functions in parallel, with deadlines and errors that name the record. Imports no torch."""

from areno.rewards.runner import RewardOutcome, RewardRunner

__all__ = ["RewardOutcome", "RewardRunner"]
