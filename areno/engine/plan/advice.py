"""Find option changes that make a run fit into memory, by planning the run's memory with each change."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.options import flag_of
from areno.engine.plan.memory_plan import MemoryPlan, make_plan, plan_device

Change = dict[str, Any]


def advise(options: TrainOptions, plan: MemoryPlan) -> list[str]:
    """Return command-line options that together make a run fit into memory; an empty list if no options make the run fit.

    The options with the smallest effect on speed and results come first.
    """

    def planned(change: Change) -> tuple[bool, int]:
        changed = make_plan(dataclasses.replace(options, **change), plan.available)
        return changed.fits, changed.peak.total

    change = least_changes(_changes(options), planned, plan.peak.total)
    return [flag_of(name) if value is True else f"{flag_of(name)} {value}" for name, value in change.items()]


def least_changes(changes: Iterable[Change], planned: Callable[[Change], tuple[bool, int]], size: int) -> Change:
    """Try the changes in order, and keep each change that reduces memory. Stop as soon as the run fits.

    Return the kept changes; {} if the run does not fit even with all changes. ``planned`` returns whether the run fits with the
    given changes, and the run's peak memory in bytes. ``size`` is the peak memory in bytes without changes.
    """
    accepted: Change = {}
    for change in changes:
        fits, needed = planned(accepted | change)
        if fits:
            return accepted | change
        if needed < size:
            accepted, size = accepted | change, needed
    return {}


def _changes(options: TrainOptions) -> Iterator[Change]:
    """Yield the possible changes, starting with those that have the smallest effect on speed and results.

    Several changes can set the same option, such as smaller and smaller values of ``mini_bs``. If the caller combines such
    changes, the last one determines the value.
    """
    rollout = get_algorithm(options.algo).requires_rollout
    if rollout and not options.drop_rollout_state:
        yield {"drop_rollout_state": True}
    if not options.activation_checkpointing:
        yield {"activation_checkpointing": True}
    least = 2 if get_algorithm(options.algo).learns_from_pairs else 1
    yield from ({"mini_bs": value} for value in halves(options.mini_bs, least))
    if rollout:
        yield from ({"max_running_prompts": value} for value in halves(options.running_sequences, 1))
    if not options.adam_8bit:
        yield {"adam_8bit": True}
    if plan_device(options).type == "cuda" and not options.offload_optimizer:
        yield {"offload_optimizer": True}
    if plan_device(options).type == "cuda" and not options.offload_activations:
        yield {"offload_activations": True}
    yield from ({"max_new_tokens": value} for value in halves(options.max_new_tokens, 64))
    if options.dtype != "bfloat16":
        yield {"dtype": "bfloat16"}


def halves(value: int, least: int) -> Iterator[int]:
    """Halve ``value`` repeatedly, as long as the result is at least ``least``. Yield each result, but not ``value`` itself.

    Yielded results are rounded down to a multiple of ``least``, but the halving continues with the unrounded result.
    """
    while value // 2 >= least:
        value //= 2
        yield value - value % least


def largest_remedy(plan: MemoryPlan) -> str:
    """Return advice for a run that does not fit into memory even with the changes that :func:`advise` tries."""
    weights = plan.peak.parts["weights"] + plan.peak.parts["roles"]
    if weights * plan.sharing > plan.available:
        return "The weights alone exceed the free memory; use a smaller model, or a machine with more memory."
    return "No option change that areno tried makes the run fit; use a smaller model, or a machine with more memory."
