"""What each rank does when sizes are tried out, or phases measured; called by :meth:`Engine.each_rank`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.engine.engine import Engine
from areno.engine.plan.memory import available_bytes, begin_peak, held_memory, peak_since, return_freed_memory
from areno.loss_fns.pack import LossFn
from areno.types import TrainSequence


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds before anything is tried."""

    held: int  # bytes, with the states of the optimizer
    available: int
    states: int


def prepare(engine: Engine, keep_rollout_state: bool) -> Held:
    """Allocate what the first step would, and look at the memory."""
    engine.config.keep_rollout_state = keep_rollout_state
    device, optimizer = engine.config.device, engine.actor.trained_by()
    optimizer.allocate()
    return_freed_memory(device)
    return Held(held_memory(device), available_bytes(device), optimizer.held_bytes())


def begin(engine: Engine) -> None:
    """Begin a new peak."""
    begin_peak(engine.config.device)


def peak(engine: Engine) -> int:
    """Bytes that the rank held at most since the peak began."""
    return peak_since(engine.config.device)


def rehearse(engine: Engine, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int) -> int | None:
    """Compute gradients of rows of this replica's own, and forget them; bytes held at most, None if memory ran out.

    Ranks of a replica compute together, so there one that runs out cannot go on, and raises.
    """
    begin(engine)
    try:
        engine.actor.training.rehearse(rows, loss_fn, mini_bs)
    except torch.cuda.OutOfMemoryError:
        if engine.config.peers.layout.tp_size > 1:
            raise
        return None
    return peak(engine)


def clean(engine: Engine) -> None:
    """Free what a try has left; generation must have ended."""
    engine.actor.trained_by().zero_grad()
    engine.loop.wait_idle()
    engine.loop.drop_cache()
    return_freed_memory(engine.config.device)


def recover(engine: Engine) -> bool:
    """Let generation go on after it has died; returns whether memory was what it lacked."""
    engine.loop.wait_idle()
    return isinstance(engine.loop.restart(), torch.cuda.OutOfMemoryError)


def random_state(engine: Engine) -> dict[str, Any]:
    """Random state of the rank."""
    return capture_rng()


def restore_random(engine: Engine, states: Sequence[dict[str, Any]]) -> None:
    """Put the random state of each rank back."""
    peers = engine.config.peers
    restore_rng(states[peers.rank])
