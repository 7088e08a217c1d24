"""Counts cores that this process may use, and cores that other programs keep busy."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areno.control_groups import GROUPS, MEMBERSHIP, groups_of


def usable_cores() -> int:
    """Return the number of cores that this process may use.

    The result is the number of cores in the process's affinity mask, but at most the container's CPU limit (rounded up).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup_limit()
    return cores if limit is None else max(min(cores, math.ceil(limit)), 1)


def openmp_threads() -> int | None:
    """Return the first number in the list ``OMP_NUM_THREADS``; None if the variable is unset or invalid."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def cgroup_limit(root: Path = GROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU limit of this process's control groups, in cores (``docker run --cpus``); None if there is no limit."""
    limits = [quota / period for quota, period in _quotas(root, membership) if quota > 0 and period > 0]
    return min(limits, default=None)


def _quotas(root: Path, membership: Path) -> Iterator[tuple[float, float]]:
    """Yield the CPU quota of each control group and the quota's period, both in microseconds.

    The first group is the process's own group, and the last group is the root. A negative quota means that there is no limit.
    """
    for group in groups_of("cpu", root, membership):
        names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = " ".join(map(group.read, names)).split()
            yield -1.0 if quota == "max" else float(quota), float(period)
        except (OSError, ValueError):
            continue


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Cumulative CPU times at one moment, in seconds."""

    wall: float  # time of the measurement (monotonic clock)
    busy: float  # busy time of the usable cores
    own: float  # CPU time of this run's processes


def busy_elsewhere(before: CpuTimes, after: CpuTimes) -> float:
    """Return the mean number of cores that other programs kept busy between ``before`` and ``after``."""
    busy, own = after.busy - before.busy, after.own - before.own
    return max(busy - own, 0.0) / max(after.wall - before.wall, 1e-9)


def read_cpu_times(root_pid: int) -> CpuTimes | None:
    """Return the current :class:`CpuTimes`; None if the system does not report CPU times.

    Args:
        root_pid: id of the process that started this run. The run consists of the root process and its descendants.
    """
    import psutil

    try:
        cores = psutil.cpu_times(percpu=True)
        root = psutil.Process(root_pid)
        tree = [root, *root.children(recursive=True)]
    except (psutil.Error, OSError):
        return None
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    busy = sum(getattr(cores[i], name, 0.0) for i in allowed if i < len(cores) for name in names)
    return CpuTimes(time.monotonic(), busy, sum(map(_process_seconds, tree)))


def _process_seconds(process: object) -> float:
    """Return the CPU time of a process and of its terminated children."""
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        times = process.cpu_times()
    except (psutil.Error, OSError):
        return 0.0
    return sum(getattr(times, name, 0.0) for name in ("user", "system", "children_user", "children_system"))
