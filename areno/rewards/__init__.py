"""Running reward functions: parallel, with deadlines, and with errors that name the record. No torch here."""

from areno.rewards.runner import RewardOutcome, RewardRunner

__all__ = ["RewardOutcome", "RewardRunner"]
