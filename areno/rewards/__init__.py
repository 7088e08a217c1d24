"""Runs reward functions in parallel, with deadlines. The package does not import torch.

- ``runner``: rewards of a batch, with deadlines and retries; ``worker_pool``: the processes and threads that compute rewards.
- ``worker``: the loop of a worker; ``supervisor``: kills all processes that a worker process has started.
- ``math``: a reward function that verifies math answers; ``judge``: a reward function that asks an LLM for grades.
"""

from areno.rewards.runner import RewardOutcome, RewardRunner

__all__ = ["RewardOutcome", "RewardRunner"]
