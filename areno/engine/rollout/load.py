"""The current load of a rollout loop, and counts of its tokens and steps since the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(slots=True)
class EngineLoad:
    """The current load of a rollout loop, and the loop's totals since the start."""

    waiting: int = 0  # queued samples
    running: int = 0  # samples in a slot
    kv_tokens_used: int = 0  # cells of the KV cache in use
    kv_tokens: int = 0  # budget of the KV cache in cells
    generated_total: int = 0  # tokens sampled
    prefilled_total: int = 0  # context tokens computed in prefills
    reused_total: int = 0  # context tokens taken from the prefix cache
    preemptions_total: int = 0  # samples preempted back to the queue
    drafted_total: int = 0  # draft tokens of speculative decoding
    agreed_total: int = 0  # draft tokens accepted
    decode_steps_total: int = 0  # decode steps
    replayed_steps_total: int = 0  # decode steps replayed from CUDA graphs

    @classmethod
    def total(cls, loads: Iterable[EngineLoad]) -> EngineLoad:
        """Return the sum of several loads."""
        added = (sum(numbers) for numbers in zip(*map(astuple, loads), strict=True))
        return cls(*added)
