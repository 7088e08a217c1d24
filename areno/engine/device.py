"""Which device each thread and each rank computes on."""

from __future__ import annotations

import torch

from areno.errors import UsageError


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current one: Triton, streams and graphs use that, wherever their tensors are.

    A thread starts on GPU 0, whatever the thread that started it uses.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def rank_devices(first: torch.device, ranks: int, present: int, chosen: list[int] | None = None) -> list[torch.device]:
    """One device per rank of an engine.

    Args:
        first: that of rank 0; ranks on GPUs take the following ones.
        ranks: how many there are.
        present: GPUs of this machine.
        chosen: GPU of each rank, where the user names them.

    Raises:
        UsageError: there are too few GPUs, or not one per rank is named.
    """
    if chosen is not None and len(chosen) != ranks:
        raise UsageError(f"devices={chosen} are {len(chosen)}, world_size={ranks}; give one device per rank")
    if first.type != "cuda":
        return [first] * ranks
    start = first.index or 0
    numbers = chosen or list(range(start, start + ranks))
    if max(numbers) >= present:
        remedy = f"use --world-size {present - start}" if 0 < present - start < ranks else "name GPUs from 0 on"
        raise UsageError(
            f"--world-size {ranks}: this machine has {present} GPU{'s' * (present != 1)}, and the ranks would take GPU "
            f"{', '.join(map(str, numbers))}; {remedy}, or use --device cpu"
        )
    return [torch.device("cuda", number) for number in numbers]
