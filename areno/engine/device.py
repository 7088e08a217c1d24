"""Which device each thread and each rank computes on, and what goes there and back without making the host wait."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from areno.config.machine import gpu_problem
from areno.errors import UsageError


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current one: Triton, streams and graphs use that, wherever their tensors are.

    A thread starts on GPU 0, whatever the thread that started it uses.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def use_deterministic_algorithms() -> None:
    """Compute alike in every run, as far as PyTorch can: it warns of operations that have no such algorithm."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is none of them
    torch.use_deterministic_algorithms(True, warn_only=True)


def rank_devices(first: torch.device, ranks: int, present: int, chosen: list[int] | None = None) -> list[torch.device]:
    """One device per rank of an engine: ``first`` and the GPUs after it, or those that are ``chosen``.

    Raises UsageError: there are too few GPUs, or not one per rank is named.
    """
    if chosen is not None and len(chosen) != ranks:
        raise UsageError(f"devices={chosen} are {len(chosen)}, world_size={ranks}; give one device per rank")
    if first.type != "cuda":
        return [first] * ranks
    start = first.index or 0
    if problem := gpu_problem(str(first), ranks, present, chosen):
        raise UsageError(problem)
    return [torch.device("cuda", number) for number in chosen or range(start, start + ranks)]


def read_all(values: Sequence[Tensor | float]) -> list[float]:
    """Numbers of tensors with one element: the host waits once for each device, not once for each tensor."""
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(index)
    numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    for indices in by_device.values():
        tensors = [values[index].detach().double().reshape(()) for index in indices]  # type: ignore[union-attr]
        for index, number in zip(indices, torch.stack(tensors).tolist(), strict=True):
            numbers[index] = number
    return numbers


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the host to a device; the copy of one that lies in page-locked memory is not waited for."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
