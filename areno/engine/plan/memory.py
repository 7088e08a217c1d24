"""How much memory this process may still use."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Leaves the larger part to weights, gradients and activations, which peak when the cache is idle but not freed.
KV_SHARE = 0.4


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; for a CPU what the kernel calls available, bounded by the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_available(), _cgroup_available())


def default_kv_tokens(device: torch.device, bytes_per_token: int) -> int:
    """KV budget that uses ``KV_SHARE`` of what is free."""
    return max(int(available_bytes(device) * KV_SHARE) // max(bytes_per_token, 1), 1024)


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the portable figures below
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_available() -> int:
    """Head-room under a version 2 control group; unlimited where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return 2**62 if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return 2**62
