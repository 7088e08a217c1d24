"""Functions that run on each rank (:meth:`Engine.run_on_all_ranks`), to try batch sizes and to measure memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.engine.engine import Engine
from areno.engine.plan.memory_probe import available_bytes, begin_peak, held_memory, peak_since, return_freed_memory
from areno.loss_fns.loss_interface import LossFn
from areno.types import TrainSequence


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Used memory, free memory and optimizer states of a rank, in bytes, before the first trial of ``--tune-params``."""

    held: int  # including optimizer states
    available: int
    states: int


def prepare(engine: Engine, keep_rollout_state: bool) -> RankMemory:
    """Set the engine's option ``keep_rollout_state``, allocate the optimizer states, and measure used and free memory."""
    engine.config.keep_rollout_state = keep_rollout_state
    device, optimizer = engine.config.device, engine.actor.trained_by()
    optimizer.allocate()
    return_freed_memory(device)
    return RankMemory(held_memory(device), available_bytes(device), optimizer.held_bytes())


def begin(engine: Engine) -> None:
    """Start a new measurement of the peak memory use."""
    begin_peak(engine.config.device)


def peak(engine: Engine) -> int:
    """Return the peak memory of the rank since :func:`begin`, in bytes."""
    return peak_since(engine.config.device)


def gpu_bytes(engine: Engine) -> int:
    """Return the peak size in bytes of this rank's GPU tensors since :func:`begin` or the start of the process; 0 on a CPU."""
    device = engine.config.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def rehearse(engine: Engine, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int) -> int | None:
    """Compute and discard the gradients of this replica's rows. Return the peak memory in bytes.

    If GPU memory runs out, the function returns None. With tensor parallelism, the function raises the
    out-of-memory error instead, because the other ranks of the model cannot continue.
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
    """Wait until generation has finished, unmerge the adapter, and free the memory of a trial."""
    engine.actor.trained_by().zero_grad()
    engine.wait_idle()
    engine.loop.drop_cache()
    return_freed_memory(engine.config.device)


def recover(engine: Engine) -> bool:
    """If the rollout loop has failed, reset the loop, so that it accepts requests again.

    Return whether the loop failed because GPU memory ran out.
    """
    engine.loop.wait_idle()
    return isinstance(engine.loop.restart(), torch.cuda.OutOfMemoryError)


def random_state(engine: Engine) -> dict[str, Any]:
    """Return the random state of the rank."""
    return capture_rng()


def restore_random(engine: Engine, states: Sequence[dict[str, Any]]) -> None:
    """Restore this rank's random state. ``states`` has one state per rank."""
    peers = engine.config.peers
    restore_rng(states[peers.rank])
