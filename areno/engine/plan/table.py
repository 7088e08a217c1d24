"""Format a memory plan as text and as plain data."""

from collections.abc import Sequence
from typing import Any

from areno.config.all_train_options import TrainOptions
from areno.engine.plan.advice import advise, largest_remedy
from areno.engine.plan.memory_plan import PARTS, MemoryPlan

_MIB = 2**20


_TITLES = {
    "process": "process",
    "weights": "weights",
    "roles": "other models",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "kv_cache": "KV cache",
    "activations": "activations, logits",
}


def plan_text(options: TrainOptions, plan: MemoryPlan) -> str:
    """Return the plan of a run as text: memory by phase and purpose, whether the run fits, and which options to change."""
    change = [] if plan.fits else advise(options, plan)
    where = f" (in phase {plan.peak.name})"
    return "\n".join([*plan_table(plan), verdict(plan.needed, plan.available, change, largest_remedy(plan), where)])


def plan_table(plan: MemoryPlan) -> list[str]:
    """Return the lines of a table of memory by phase and purpose."""
    trained = "" if plan.trained == plan.parameters else f", {plan.trained / 1e6:,.2f} M trained"
    size = f"{plan.parameters / 1e6:,.2f} M parameters{trained}, {plan.dtype} on {plan.device}"
    memory = "the memory of one rank" if plan.layout.world_size > 1 else "the memory"
    lines = [f"Memory plan in MiB ({size}); the columns show {memory} at the peak of each phase"]
    lines.append(f"  {'':<20}" + "".join(f"{phase.name:>12}" for phase in plan.phases))
    for part in PARTS:
        figures = [phase.parts[part] for phase in plan.phases]
        if any(figures):
            lines.append(_row(_TITLES[part], figures))
    lines.append(_row("sum", [phase.total for phase in plan.phases]))
    if plan.sharing > 1:
        lines.append(_row(f"all {plan.sharing} ranks", [plan.of_all(phase) for phase in plan.phases]))
    return lines + _notes(plan)


def _row(title: str, figures: list[int]) -> str:
    return f"  {title:<20}" + "".join(f"{figure / _MIB:>12,.1f}" for figure in figures)


def _notes(plan: MemoryPlan) -> list[str]:
    lines = []
    replicas, parts = plan.layout.dp_size, plan.layout.tp_size
    if plan.layout.world_size > 1:
        copies = f"{replicas} replicas" if replicas > 1 else "one replica"
        split = f" of {parts} ranks" if parts > 1 else ""
        memories = "all share the memory of this machine" if plan.sharing > 1 else "each rank has its own device"
        lines.append(f"  Ranks: {copies}{split}; {memories}.")
    if plan.logits:
        lines.append(f"  The activations include at most {plan.logits / _MIB:,.1f} MiB of logits.")
    if plan.cache_wanted:
        note = f"  The KV cache{' of each replica' if replicas > 1 else ''} has {plan.cache_tokens:,} tokens"
        if plan.cache_tokens < plan.cache_wanted:
            note += f", but the longest sequences need up to {plan.cache_wanted:,}; some sequences may have to wait"
        lines.append(f"{note}.")
    if plan.host:
        lines.append(f"  Host memory holds {plan.host / _MIB:,.1f} MiB of offloaded data.")
    return lines


def verdict(needed: int, available: int, change: Sequence[str], remedy: str, where: str = "") -> str:
    """Return a text that states whether a run fits into memory. If not, the text also states what to change.

    ``change`` lists options with which the run fits. If the list is empty, the text contains ``remedy`` instead.
    """
    figures = f"The peak is {needed / _MIB:,.1f} MiB{where}, and {available / _MIB:,.1f} MiB are free now"
    if needed <= available:
        return f"Fits: yes. {figures}."
    advice = f"The run fits with {' '.join(change)}" if change else remedy.removesuffix(".")
    return f"Fits: no. {figures}. {advice}."


def plan_data(options: TrainOptions, plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan of a run as plain data. If the run does not fit, ``change`` lists options that make it fit."""
    return plan_numbers(plan) | {"change": [] if plan.fits else advise(options, plan)}


def plan_numbers(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan as plain data, with all sizes in bytes."""
    return {
        "parameters": plan.parameters,
        "dtype": plan.dtype,
        "device": plan.device,
        "phases": {phase.name: {**phase.parts, "total": phase.total} for phase in plan.phases},
        "logits": plan.logits,
        "host": plan.host,
        "kv_cache_tokens": plan.cache_tokens,
        "ranks": {
            "world_size": plan.layout.world_size,
            "tp_size": plan.layout.tp_size,
            "share_memory": plan.sharing > 1,
        },
        "peak": {"phase": plan.peak.name, "bytes": plan.peak.total, "all_ranks": plan.needed},
        "available": plan.available,
        "fits": plan.fits,
    }
