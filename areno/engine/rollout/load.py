"""What a rollout loop has done and is doing, as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(slots=True)
class EngineLoad:
    """What a loop is busy with, and its totals since it began."""

    waiting: int = 0  # samples in the queue
    running: int = 0  # samples that hold a slot
    kv_tokens_used: int = 0  # cells of the KV cache in use
    kv_tokens: int = 0  # its budget
    generated_total: int = 0  # tokens sampled
    prefilled_total: int = 0  # prompt tokens computed
    reused_total: int = 0  # prompt tokens taken from the prefix store
    preemptions_total: int = 0  # samples sent back to the queue
    drafted_total: int = 0  # tokens that speculation proposed
    agreed_total: int = 0  # those of them that were sampled
    decode_steps_total: int = 0  # decode steps
    replayed_steps_total: int = 0  # those of them that were replayed from CUDA graphs

    @classmethod
    def total(cls, loads: Iterable[EngineLoad]) -> EngineLoad:
        """The load of several loops together."""
        added = (sum(numbers) for numbers in zip(*map(astuple, loads), strict=True))
        return cls(*added)
