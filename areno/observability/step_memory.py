"""Measures after each step how much memory the run uses, and how much memory of its machine is available."""

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
    """Measures the memory use of a run.

    Measurements take at most 1 % of the run's time. If steps are short, most steps repeat the values of the last measurement.
    Linux records the peak host memory of each process, and PyTorch records the peak GPU memory. Therefore, a peak between two
    measurements is not missed, unless the process exits before the second measurement. On other operating systems, a peak of
    host memory between two measurements is missed.

    Args:
        gpu_bytes: function that returns the peak size of the tensors on a GPU, in bytes; 0 without a GPU.
    """

    def __init__(self, gpu_bytes: Callable[[], int]) -> None:
        self._gpu_bytes = gpu_bytes
        self._due = 0.0
        self._peak = 0
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """Return the memory metrics of the step that has just ended: a dictionary of names and values in GiB."""
        start = time.monotonic()
        if start >= self._due:
            self._peak = max(self._peak, resident_bytes(os.getpid(), peak=True))
            self._figures = {PEAK: self._peak / GIB, AVAILABLE: free_bytes() / GIB}
            if gpu := self._gpu_bytes():
                self._figures[PEAK_GPU] = gpu / GIB
            end = time.monotonic()
            self._due = end + (end - start) / _SHARE
        return self._figures
