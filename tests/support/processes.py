"""Processes on this machine, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.preloaded import Forked


def workers_of(parent: int) -> list[int]:
    """Ids of the worker processes that a process has started, sorted."""
    pids = [each.pid for each in Forked.ranks if parent == os.getpid() and alive(each.pid)]
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == parent and fields[0] != "Z" and b"areno.engine.parallel.worker" in command:
            pids.append(int(folder.name))
    return sorted(pids)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
