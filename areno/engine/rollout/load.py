"""What a rollout loop has done and is doing, as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(slots=True)
class EngineLoad:
    """What a loop is busy with, and its totals since it began.

    Attributes:
        waiting: samples in the queue.
        running: samples that hold a slot.
        kv_tokens_used: cells of the KV cache in use.
        kv_tokens: its budget.
        generated_total: tokens sampled.
        prefilled_total: prompt tokens computed.
        reused_total: prompt tokens taken from the prefix store.
        preemptions_total: samples sent back to the queue.
        drafted_total: tokens that speculation proposed.
        agreed_total: those of them that were sampled.
        decode_steps_total: decode steps.
        replayed_steps_total: those of them that were replayed from CUDA graphs.
    """

    waiting: int = 0
    running: int = 0
    kv_tokens_used: int = 0
    kv_tokens: int = 0
    generated_total: int = 0
    prefilled_total: int = 0
    reused_total: int = 0
    preemptions_total: int = 0
    drafted_total: int = 0
    agreed_total: int = 0
    decode_steps_total: int = 0
    replayed_steps_total: int = 0

    @classmethod
    def total(cls, loads: Iterable[EngineLoad]) -> EngineLoad:
        """The load of several loops together."""
        added = (sum(numbers) for numbers in zip(*map(astuple, loads), strict=True))
        return cls(*added)
