"""Host memory: how much is free, how much is installed, and how much a run uses.

The numbers respect the limits of control groups.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from areno.control_groups import GROUPS, MEMBERSHIP, ControlGroup, groups_of

_UNLIMITED = 2**62


def free_bytes() -> int:
    """Return the number of bytes that can still be allocated.

    The result is the smaller of the memory that the kernel reports as available and the memory that control groups leave. If
    the kernel does not report a number, half of the physical memory counts as available.
    """
    portable = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(proc_figure("/proc/meminfo", "MemAvailable") or portable, left_in_groups())


def total_bytes() -> int:
    """Return the physical memory in bytes. If control groups allow less, return the smallest limit."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), group_limit())


def resident_bytes(root_pid: int, *, peak: bool = False) -> int:
    """Return the resident bytes of a process plus the unshared resident bytes of its descendants; 0 if unknown.

    If ``peak`` is true, the peak of each process is used instead of its current value. Only Linux records peaks.
    """
    import psutil

    try:
        root = psutil.Process(root_pid)
        descendants = root.children(recursive=True)
        held = _resident(root, root.memory_info().rss, peak)
    except (psutil.Error, OSError):
        return 0
    for process in descendants:
        with suppress(psutil.Error, OSError):
            use = process.memory_info()
            held += _resident(process, use.rss, peak) - getattr(use, "shared", 0)
    return int(held)


def _resident(process: Any, now: int, peak: bool) -> int:
    return max(proc_figure(f"/proc/{process.pid}/status", "VmHWM"), now) if peak else now


def proc_figure(file: str, name: str) -> int:
    """Return an entry of a ``/proc`` file, converted from KiB to bytes.

    If the entry is missing, as on systems other than Linux, return 0.
    """
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def group_limit(root: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the lowest memory limit of the process's control groups in bytes; 2**62 without a limit."""
    return min((_limit(group) for group in groups_of("memory", root, membership)), default=_UNLIMITED)


def left_in_groups(root: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of bytes left under the limits of the process's control groups; 2**62 without a limit."""
    return min((_left(group) for group in groups_of("memory", root, membership)), default=_UNLIMITED)


def _limit(group: ControlGroup) -> int:
    with suppress(OSError, ValueError):  # "max" is no limit
        return min(int(group.read("memory.max" if group.version == 2 else "memory.limit_in_bytes")), _UNLIMITED)
    return _UNLIMITED


def _left(group: ControlGroup) -> int:
    limit = _limit(group)
    if limit == _UNLIMITED:
        return limit
    try:
        used = int(group.read("memory.current" if group.version == 2 else "memory.usage_in_bytes"))
    except (OSError, ValueError):
        return limit
    return max(limit - used + _reclaimable(group), 0)


def _reclaimable(group: ControlGroup) -> int:
    """Return the size in bytes of the group's inactive page cache, which the kernel reclaims on demand."""
    name = "inactive_file" if group.version == 2 else "total_inactive_file"
    with suppress(OSError, ValueError):
        for line in group.read("memory.stat").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
