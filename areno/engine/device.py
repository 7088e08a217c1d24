"""Select devices for threads and ranks, and copy data between host and device with little synchronization."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from areno.config.machine import gpu_problem
from areno.errors import UsageError


def use_device(device: torch.device) -> None:
    """Make ``device`` the current GPU of the calling thread. For a CPU, do nothing.

    Triton kernels, CUDA streams and CUDA graphs use the current GPU, even for tensors on another GPU. The current GPU of a new
    thread is GPU 0, not the GPU of the thread that started it.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def use_deterministic_algorithms() -> None:
    """Enable PyTorch's deterministic algorithms. PyTorch warns about operations that have no deterministic algorithm."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this variable
    torch.use_deterministic_algorithms(True, warn_only=True)


def rank_devices(first: torch.device, ranks: int, present: int, chosen: list[int] | None = None) -> list[torch.device]:
    """Return one device per rank of an engine.

    If ``first`` is not a GPU, all ranks use ``first``. If ``chosen`` is given, the ranks use the GPUs with these numbers.
    Otherwise, the ranks use consecutive GPUs, starting with ``first``. ``present`` is the number of GPUs of this machine.

    Raises UsageError: there are too few GPUs, or the length of ``chosen`` is not the number of ranks.
    """
    if chosen is not None and len(chosen) != ranks:
        raise UsageError(f"devices={chosen} has length {len(chosen)}, but world_size={ranks}; give one device per rank")
    if first.type != "cuda":
        return [first] * ranks
    start = first.index or 0
    if problem := gpu_problem(str(first), ranks, present, chosen):
        raise UsageError(problem)
    return [torch.device("cuda", number) for number in chosen or range(start, start + ranks)]


def read_all(values: Sequence[Tensor | float]) -> list[float]:
    """Convert one-element tensors and floats to floats, with only one host-device synchronization per device."""
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
    """Copy a host tensor to a device. A copy to a GPU is asynchronous and uses pinned host memory."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
