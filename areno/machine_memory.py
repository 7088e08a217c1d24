"""Host memory: how much is free or installed, within the container's limit, and how much a run uses. No torch import."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_GROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the bytes that can still be allocated: what the kernel reports as available, within the container's limit.

    If the kernel does not report it, half of the physical memory counts as available.
    """
    portable = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(proc_figure("/proc/meminfo", "MemAvailable") or portable, _left_in_group())


def total_bytes() -> int:
    """Return the physical memory in bytes, or the limit of the container if that is lower."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _group_limit())


def resident_bytes(root_pid: int, *, peak: bool = False) -> int:
    """Return the resident bytes of a process and the unshared resident bytes of its descendants; 0 if unknown.

    With ``peak``, uses each process's peak instead of its current value, if the kernel records it (Linux).
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
    """Return an entry of a ``/proc`` file, converted from KiB to bytes; 0 if it is missing, as on systems other than Linux."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _group_limit() -> int:
    """Return the container's memory limit (cgroup v2) in bytes; huge if there is none."""
    with suppress(OSError, ValueError):
        return int((_GROUP / "memory.max").read_text())
    return 2**62


def _left_in_group() -> int:
    """Return the bytes left under the limit; huge if there is no limit."""
    limit = _group_limit()
    try:
        return max(limit - int((_GROUP / "memory.current").read_text()) + _reclaimable(_GROUP / "memory.stat"), 0)
    except (OSError, ValueError):
        return limit


def _reclaimable(stat: Path) -> int:
    """Return the size in bytes of the group's inactive page cache, which the kernel reclaims on demand."""
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
