"""Tool latencies of ``async_vs_sync.py``, and how fast a step can be if only tools and training take time.

A group is a prompt with its samples, which run concurrently; it ends with its slowest sample. With B groups in a batch, C
concurrent groups, a maximum staleness of E versions, T seconds of training, and g the seconds of a group:

    synchronous    step >= mean over batches of max(g of the batch) + T            (C >= B)
    asynchronous   step >= max(T, B * mean(g) / min(C, (E + 1) * B))

The first holds because a batch starts with the weights of the previous batch, and ends with its slowest group. The second is
Little's law: the admission rule allows at most min(C, (E + 1) * B) running groups, each for mean(g), and a step consumes B of
them. :func:`ideal_step` simulates the admission rule itself, with generation that takes no time: groups that are ready keep
their places while they wait for their batch, so even then a step takes longer than the bound.
"""

from __future__ import annotations

import heapq
import random
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Log-normal latencies of tools; the same numbers for the same seed, group, sample and turn, in any order.

    Attributes:
        median_s: median in seconds.
        sigma: standard deviation of the logarithm.
        cap_s: maximum in seconds.
        turns: turns of an episode, with one latency each.
        seed: seed of the draws.
        scale: factor on all latencies.
    """

    median_s: float = 0.3
    sigma: float = 1.2
    cap_s: float = 20.0
    turns: int = 8
    seed: int = 0
    scale: float = 1.0

    def of_episode(self, group: int, sample: int) -> list[float]:
        """Seconds of each turn's tool."""
        drawn = random.Random(f"{self.seed} {group} {sample}")
        found = (self.median_s * drawn.lognormvariate(0.0, self.sigma) for _ in range(self.turns))
        return [self.scale * min(seconds, self.cap_s) for seconds in found]

    def of_group(self, group: int, samples: int) -> float:
        """Seconds of the slowest sample."""
        return max(sum(self.of_episode(group, sample)) for sample in range(samples))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both sides do.

    Attributes:
        batch: groups of a step.
        concurrent: maximum number of concurrent groups.
        ahead: maximum staleness in versions (``max_head_offpolicyness``).
        train_s: seconds from a batch to the new weights.
    """

    batch: int
    concurrent: int
    ahead: int
    train_s: float


def bound(work: Work, groups: list[float]) -> float:
    """Minimum seconds per step, averaged over batches of these groups; see the module docstring.

    Args:
        work: what is done.
        groups: seconds of each group, in the order in which they start.
    """
    size = work.batch
    if work.ahead == 0:
        batches = [groups[start : start + size] for start in range(0, len(groups) - size + 1, size)]
        return statistics.mean(max(batch) for batch in batches) + work.train_s
    return max(work.train_s, size * statistics.mean(groups) / min(work.concurrent, (work.ahead + 1) * size))


def ideal_step(work: Work, groups: list[float], warmup: int, steps: int) -> float:
    """Mean seconds per step by the admission rule, if generation takes no time.

    Args:
        work: what is done.
        groups: seconds of each group, as many as may start before the last step ends.
        warmup: number of first steps that do not count.
        steps: number of all steps.
    """
    size, now, version, begun, used, ready = work.batch, 0.0, 0, 0, 0, 0
    running: list[float] = []  # when each ends
    trained: float | None = None  # when the running update ends
    ends: list[float] = []
    while len(ends) < steps:
        while ready + len(running) + used < (work.ahead + version + 1) * size and len(running) < work.concurrent:
            heapq.heappush(running, now + groups[begun])
            begun += 1
        if trained is None and ready >= size:
            ready, used, trained = ready - size, used + size, now + work.train_s
            continue
        if trained is not None and (not running or trained <= running[0]):
            now, version, trained = trained, version + 1, None
            ends.append(now)
        else:
            now = heapq.heappop(running)
            ready += 1
    return (ends[-1] - ends[warmup - 1]) / (steps - warmup)
