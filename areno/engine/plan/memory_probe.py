"""Measure free memory, and the current and peak memory use of this process.

On a GPU, the numbers come from CUDA and PyTorch's allocator. On a CPU, the numbers come from the operating system. Only Linux
can reset the peak of the resident set. Other systems report the peak since the start of the process. This peak can be higher
than the peak since :func:`begin_peak`.
"""

import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from areno.engine.libc_tuning import retained_bytes, trim_freed_memory
from areno.machine_memory import free_bytes, proc_figure

# Leaves most of the free memory to training, which peaks while the cache is idle but allocated.
KV_SHARE = 0.4
# Memory is short if free memory is less than this share of the memory in use. Because retained memory is fragmented, a
# training step may need that much more.
_SHORT = 0.5
_RESET = Path("/proc/self/clear_refs")


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes. For a CPU, the limit of the process's control group also applies."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_bytes()


def default_kv_tokens(device: torch.device, bytes_per_token: int) -> int:
    """Return the number of tokens whose KV cache uses the share ``KV_SHARE`` of the free memory; at least 1024 tokens."""
    return max(int(available_bytes(device) * KV_SHARE) // max(bytes_per_token, 1), 1024)


def held_memory(device: torch.device) -> int:
    """Return the used memory in bytes: the resident set of the process or, on a GPU, what PyTorch has allocated."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return proc_figure("/proc/self/status", "VmRSS") or _max_resident()


def usable_bytes(device: torch.device) -> int:
    """Return the memory in bytes that this process can still use. On a CPU, memory that the allocator retains is included."""
    return available_bytes(device) + (retained_bytes() if device.type == "cpu" else 0)


def return_freed_memory(device: torch.device) -> None:
    """Release the allocator's retained memory to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_freed_memory()


def avoid_shortage(device: torch.device, ranks: int = 1) -> None:
    """On a CPU, release the allocator's retained memory to the system if memory is short.

    Memory is short if the free memory per rank is less than the fraction ``_SHORT`` of the memory that this process uses.
    """
    if device.type == "cpu" and available_bytes(device) < _SHORT * held_memory(device) * ranks:
        trim_freed_memory()


def begin_peak(device: torch.device) -> None:
    """Start a new measurement of the peak memory use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # missing or not permitted: the peak of the whole process is an upper bound
        _RESET.write_text("5")


def peak_since(device: torch.device) -> int:
    """Return the peak memory use in bytes since :func:`begin_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return proc_figure("/proc/self/status", "VmHWM") or _max_resident()


def _max_resident() -> int:
    """Return the peak resident set of the process in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in KiB on other systems
    return used if sys.platform == "darwin" else used * 1024
