"""What to change so that a run fits: options with values that were planned, not guessed."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from areno.config.algorithms import get_algorithm
from areno.config.options import flag_of
from areno.config.train_options import TrainOptions
from areno.engine.plan.account import MemoryPlan, make_plan, plan_device

Change = dict[str, Any]


def advise(options: TrainOptions, plan: MemoryPlan) -> list[str]:
    """Options that together make a run fit, as words for the command line; empty where even they would not be enough.

    Those that change no result come first.
    """

    def tried(change: Change) -> tuple[bool, int]:
        other = make_plan(dataclasses.replace(options, **change), plan.available)
        return other.fits, other.peak.total

    change = least_changes(_changes(options), tried, plan.peak.total)
    return [flag_of(name) if value is True else f"{flag_of(name)} {value}" for name, value in change.items()]


def least_changes(changes: Iterable[Change], tried: Callable[[Change], tuple[bool, int]], size: int) -> Change:
    """The first of some changes that makes a run fit; as long as none is enough alone, it stays and the next is added.

    ``tried`` plans the run with changes: whether it fits, and its size. Empty where even all would not be enough.
    """
    kept: Change = {}
    for change in changes:
        fits, needed = tried(kept | change)
        if fits:
            return kept | change
        if needed < size:
            kept, size = kept | change, needed
    return {}


def _changes(options: TrainOptions) -> Iterator[Change]:
    """What may be changed, the least painful first; a later value of an option replaces an earlier one."""
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
    """Half of a value, half of that and so on, as multiples of ``least`` down to it."""
    while value // 2 >= least:
        value //= 2
        yield value - value % least


def largest_remedy(plan: MemoryPlan) -> str:
    """What is left to do where no option is enough."""
    weights = plan.peak.parts["weights"] + plan.peak.parts["roles"]
    if weights * plan.sharing > plan.available:
        return "Its weights alone are more than is free: take a smaller model, or a machine with more memory."
    return "No option makes it fit: take a smaller model, or a machine with more memory."
