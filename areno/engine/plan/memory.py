"""The memory of this process: what is free, what it holds, and the most that it has held while a piece of work ran.

Of a GPU PyTorch's allocator tells, of a CPU the kernel. On Linux the high-water mark of the resident set is reset before the
work. Elsewhere it only ever rises, so the peak of a piece that takes less than an earlier one is over-stated.
"""

import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from areno.engine.native import freed_and_kept, give_freed_memory_back

# Leaves the larger part to weights, gradients and activations, which peak when the cache is idle but not freed.
KV_SHARE = 0.4
# Kept memory lies in pieces, so the peak of a training step may be half above what it uses.
_SHORT = 0.5
_RESET = Path("/proc/self/clear_refs")


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; for a CPU what the kernel calls available, bounded by the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    portable = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(_figure("/proc/meminfo", "MemAvailable") or portable, _cgroup_available())


def default_kv_tokens(device: torch.device, bytes_per_token: int) -> int:
    """KV budget that uses ``KV_SHARE`` of what is free."""
    return max(int(available_bytes(device) * KV_SHARE) // max(bytes_per_token, 1), 1024)


def held_memory(device: torch.device) -> int:
    """Bytes held now: resident memory of the process, or what PyTorch has allocated on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _figure("/proc/self/status", "VmRSS") or _most()


def usable_bytes(device: torch.device) -> int:
    """Memory of a device that this process may still use: what is free, and what it has itself freed and kept."""
    return available_bytes(device) + (freed_and_kept() if device.type == "cpu" else 0)


def return_freed_memory(device: torch.device) -> None:
    """Give the system back what the process has freed and still keeps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_freed_memory_back()


def avoid_shortage(device: torch.device, ranks: int = 1) -> None:
    """Give the system back what is freed and kept, if a CPU has little else beside what ``ranks`` like this hold."""
    if device.type == "cpu" and available_bytes(device) < _SHORT * held_memory(device) * ranks:
        give_freed_memory_back()


def begin_peak(device: torch.device) -> None:
    """Begin a new peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # no such file, or not allowed: the mark of the whole process is an upper bound
        _RESET.write_text("5")


def peak_since(device: torch.device) -> int:
    """Most bytes held since the peak began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _figure("/proc/self/status", "VmHWM") or _most()


def _figure(file: str, name: str) -> int:
    """A figure of the kernel's in bytes; 0 where there is none, as on other systems than Linux."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _cgroup_available() -> int:
    """Head-room under a version 2 control group; unlimited where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text()) - _droppable(root / "memory.stat")
        return 2**62 if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return 2**62


def _droppable(stat: Path) -> int:
    """Pages of files that the group has read and not used lately: the kernel drops them when memory is asked for."""
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def _most() -> int:
    """The largest resident set of the process so far; macOS counts bytes, others KiB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
