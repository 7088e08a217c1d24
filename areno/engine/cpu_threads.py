"""Adapt PyTorch's CPU thread count to the number of cores that other programs leave free.

An example shows the need: if another program keeps one of two cores busy, two OpenMP threads take twice as long as one thread,
because each parallel region waits for the thread on the busy core. areno therefore measures the CPU use of other programs. The
first measurement takes place while the model is loading. The thread count is set after the model has been loaded, and is then
adapted at most once every ``PERIOD_S`` seconds. Each change is logged. If ``OMP_NUM_THREADS`` is set, the thread count is
fixed. Runs with equal thread counts give bitwise equal results.
"""

import logging
import os
import time

import torch

from areno.cores import CpuTimes, busy_elsewhere, openmp_threads, read_cpu_times, usable_cores

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
_FIRST_S = 0.3
# Hysteresis: smaller differences between free cores and threads are ignored. The second number is a share of ``most``.
_LEAST_CHANGE = 0.6
_LEAST_SHARE = 0.05


def adapted_threads(current: int, most: int, free: float) -> int:
    """Return the thread count for a process, from 1 to ``most``.

    ``free`` is the number of cores that other programs leave to this process. ``current`` is the present thread count.
    """
    if abs(free - current) < max(_LEAST_CHANGE, _LEAST_SHARE * most) and free < most:
        return current
    return max(min(round(free), most), 1)


class CpuThreads:
    """The CPU thread count of this process. Use the shared instance :data:`CPU_THREADS`."""

    def __init__(self) -> None:
        self.adapts = False  # whether the count follows the load
        self._fixed = openmp_threads() is not None
        self._most = self._current = 1
        self._sharing, self._root_pid = 1, os.getpid()
        self._last: CpuTimes | None = None
        self._decided_at: float | None = None

    def share(self, processes: int, root_pid: int | None = None, *, fixed: bool | None = None) -> None:
        """Declare that a run consists of ``processes`` processes, which divide the cores evenly.

        ``root_pid`` is the id of the process that started the run's processes; None means this process. If ``fixed`` is true,
        the thread count never changes. If ``fixed`` is None, the previous value of ``fixed`` stays in effect. Initially, the
        thread count is fixed only if ``OMP_NUM_THREADS`` is set.
        """
        self._sharing, self._root_pid = processes, root_pid or os.getpid()
        self._fixed = self._fixed if fixed is None else fixed
        self.adapts = False

    def begin(self) -> None:
        """Start to adapt the thread count to the CPU use of other programs, unless the thread count is fixed.

        Call this method before you load a model. While the model is loading, the CPU use of other programs is measured, and
        the first thread count is chosen accordingly. The maximum thread count is the calling thread's current count or the
        number of usable cores, whichever is lower.
        """
        if self.adapts:
            return
        self._most = self._current = min(torch.get_num_threads(), usable_cores())
        self.adapts = self._most > 1 and not self._fixed
        self._last = read_cpu_times(self._root_pid) if self.adapts else None
        self._decided_at = None
        self.apply()

    def current(self) -> int:
        """Return the current thread count."""
        if self.adapts:
            self._follow(time.monotonic())
        return self._current

    def apply(self) -> None:
        """Set PyTorch's thread count for the calling thread, and for threads that are started later."""
        if self.adapts and torch.get_num_threads() != self.current():
            torch.set_num_threads(self._current)

    def _follow(self, now: float) -> None:
        if self._last is not None:
            wait = _FIRST_S if self._decided_at is None else PERIOD_S
            if now - self._last.wall < wait:
                return
        before, self._last = self._last, read_cpu_times(self._root_pid)
        if before is None or self._last is None:
            self.adapts = False  # the platform does not report CPU times
            return
        cores, others = usable_cores(), busy_elsewhere(before, self._last)
        threads = adapted_threads(self._current, self._most, (cores - others) / self._sharing)
        if self._decided_at is None or threads != self._current:
            logger.info("CPU threads: %d; other programs keep %.1f of %d cores busy", threads, others, cores)
        self._current, self._decided_at = threads, now


CPU_THREADS = CpuThreads()
