"""Runs reward functions in parallel, with deadlines. Does not import torch.

- ``runner``: rewards of a batch, with deadlines and retries; ``worker_pool``: the processes and threads that compute
  rewards.
- ``worker``: the loop of a worker; ``supervisor``: kills all processes that a worker process has started.
- ``math`` and ``judge``: ready-made reward functions, which verify math answers or use an LLM as a judge.
"""

from areno.rewards.runner import RewardOutcome, RewardRunner

__all__ = ["RewardOutcome", "RewardRunner"]
