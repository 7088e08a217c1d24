"""Measuring what a piece of work takes at its peak: of a GPU its allocator tells, of a CPU the kernel.

On Linux the high-water mark of the resident set is reset before the work. Elsewhere it only ever rises, so the peak of a
piece that takes less than an earlier one is over-stated.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from areno.engine.native import give_freed_memory_back

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(slots=True)
class Peak:
    """Bytes that the process held at most while a piece of work ran; 0 until it has ended."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the block: resident memory of the process, or what PyTorch has allocated on a GPU."""
    found = Peak()
    begin_peak(device)
    try:
        yield found
    finally:
        found.bytes = peak_since(device)


def held_memory(device: torch.device) -> int:
    """Bytes held now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS") or _most()


def return_freed_memory(device: torch.device) -> None:
    """Give the system back what the process has freed and still keeps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
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
    return _status("VmHWM") or _most()


def _status(name: str) -> int:
    """A figure of the kernel's in bytes; 0 where there is none."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return 0


def _most() -> int:
    """The largest resident set of the process so far; macOS counts bytes, others KiB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
