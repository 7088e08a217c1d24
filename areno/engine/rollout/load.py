"""What a rollout loop has done and is doing, as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from areno.engine.rollout.scheduler import Scheduler


@dataclass(slots=True)
class RolloutCounters:
    """Totals since the loop began; ``reused`` are prompt tokens that came from the prefix store.

    ``drafted`` are tokens that speculation proposed, ``agreed`` those of them that were sampled; ``replayed_steps`` are the
    decode steps that came from a CUDA graph.
    """

    generated: int = 0
    prefilled: int = 0
    reused: int = 0
    decode_steps: int = 0
    replayed_steps: int = 0
    drafted: int = 0
    agreed: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a loop is busy with.

    Attributes:
        waiting: samples in the queue.
        running: samples that hold a slot.
        kv_tokens_used: cells of the KV cache in use.
        kv_tokens: its budget.
        generated_total: tokens sampled since the loop began.
        prefilled_total: prompt tokens computed.
        reused_total: prompt tokens taken from the prefix store.
        preemptions_total: samples sent back to the queue.
        drafted_total: tokens that speculation proposed.
        agreed_total: those of them that were sampled.
        decode_steps_total: decode steps since the loop began.
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

    @classmethod
    def of(cls, scheduler: Scheduler, counters: RolloutCounters, incoming: int) -> EngineLoad:
        """The load of a loop with so many samples that its scheduler does not know yet."""
        return cls(
            waiting=len(scheduler.waiting) + incoming,
            running=scheduler.held(),
            kv_tokens_used=scheduler.cells(),
            kv_tokens=scheduler.budget_tokens,
            generated_total=counters.generated,
            prefilled_total=counters.prefilled,
            reused_total=counters.reused,
            preemptions_total=scheduler.preemptions,
            drafted_total=counters.drafted,
            agreed_total=counters.agreed,
            decode_steps_total=counters.decode_steps,
            replayed_steps_total=counters.replayed_steps,
        )
