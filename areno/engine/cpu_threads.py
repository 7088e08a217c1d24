"""How many threads torch computes with on a CPU, adapted to what other programs leave free.

Beside one busy process on two cores, two OpenMP threads are twice as slow as one, because every parallel region waits for
the thread that shares its core. So the number follows the load: it is decided when a model has been loaded and again while
the run goes on, at most once in ``PERIOD_S``, and each change is logged. ``OMP_NUM_THREADS`` fixes it. Results are
reproducible bit for bit at equal numbers of threads.
"""

import logging
import os
import time

import torch

from areno.cores import CpuTimes, busy_elsewhere, openmp_threads, read_cpu_times, usable_cores

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
_FIRST_S = 0.3
# A change must be worth this many cores, or this share of them on a large machine, so that the number does not flicker.
_LEAST_CHANGE = 0.6
_LEAST_SHARE = 0.05


def adapted_threads(current: int, most: int, free: float) -> int:
    """Number of threads to go on with, at most ``most``, where other programs leave ``free`` cores."""
    if abs(free - current) < max(_LEAST_CHANGE, _LEAST_SHARE * most) and free < most:
        return current
    return max(min(round(free), most), 1)


class CpuThreads:
    """Threads of this process; :data:`CPU_THREADS` is the one that everything uses."""

    def __init__(self) -> None:
        self.adapts = False  # the number follows the load; else it is left as it is
        self._fixed = openmp_threads() is not None
        self._most = self._current = 1
        self._sharing, self._root_pid = 1, os.getpid()
        self._last: CpuTimes | None = None
        self._decided_at: float | None = None

    def share(self, processes: int, root_pid: int | None = None, *, fixed: bool | None = None) -> None:
        """This process is one of several of a run, which share the cores evenly.

        ``root_pid`` has started them; None is this one. ``fixed``: their number of threads stays; None goes by
        ``OMP_NUM_THREADS``.
        """
        self._sharing, self._root_pid = processes, root_pid or os.getpid()
        self._fixed = self._fixed if fixed is None else fixed
        self.adapts = False

    def begin(self) -> None:
        """Start to follow the load, before a model is loaded: the load while it loads makes the first decision.

        The calling thread's number, within the process's CPU limit, is what is used where nothing else runs. A second call
        does nothing while the number follows the load.
        """
        if self.adapts:
            return
        self._most = self._current = min(torch.get_num_threads(), usable_cores())
        self.adapts = self._most > 1 and not self._fixed
        self._last = read_cpu_times(self._root_pid) if self.adapts else None
        self._decided_at = None
        self.apply()

    def current(self) -> int:
        """Threads to compute with now."""
        if self.adapts:
            self._follow(time.monotonic())
        return self._current

    def apply(self) -> None:
        """Use that many in the calling thread; torch hands the number on to threads that start later."""
        if self.adapts and torch.get_num_threads() != self.current():
            torch.set_num_threads(self._current)

    def _follow(self, now: float) -> None:
        if self._last is not None:
            wait = _FIRST_S if self._decided_at is None else PERIOD_S
            if now - self._last.wall < wait:
                return
        before, self._last = self._last, read_cpu_times(self._root_pid)
        if before is None or self._last is None:
            self.adapts = False  # the system does not tell
            return
        cores, others = usable_cores(), busy_elsewhere(before, self._last)
        wanted = adapted_threads(self._current, self._most, (cores - others) / self._sharing)
        if self._decided_at is None or wanted != self._current:
            logger.info("CPU threads: %d; other programs keep %.1f of %d cores busy", wanted, others, cores)
        self._current, self._decided_at = wanted, now


CPU_THREADS = CpuThreads()
