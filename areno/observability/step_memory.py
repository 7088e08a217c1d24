"""Records with each step how much memory the run uses and how much its machine has left."""

import os
import time
from collections.abc import Callable

from areno.machine_memory import free_bytes, resident_bytes

PEAK = "memory/peak_resident_gib"
AVAILABLE = "memory/available_gib"
PEAK_GPU = "memory/peak_gpu_gib"
GIB = 2**30
_SHARE = 0.01  # fraction of the time that readings may take: finding all descendants of a process takes milliseconds


class StepMemory:
    """Reads the memory figures of a run.

    A reading takes time, so readings take at most 1 % of the time. If steps are short, most steps repeat the last
    figures. The kernel and PyTorch record peaks, so a peak between two readings is not missed. Only the peak of a
    process that has exited between readings can be lost.

    Args:
        gpu_bytes: returns the peak number of bytes of tensors on a GPU; 0 without a GPU.
    """

    def __init__(self, gpu_bytes: Callable[[], int]) -> None:
        self._gpu_bytes = gpu_bytes
        self._due = 0.0
        self._peak = 0
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """The figures after a step by metric name, in GiB."""
        start = time.monotonic()
        if start >= self._due:
            self._peak = max(self._peak, resident_bytes(os.getpid(), peak=True))
            self._figures = {PEAK: self._peak / GIB, AVAILABLE: free_bytes() / GIB}
            if gpu := self._gpu_bytes():
                self._figures[PEAK_GPU] = gpu / GIB
            end = time.monotonic()
            self._due = end + (end - start) / _SHARE
        return self._figures
