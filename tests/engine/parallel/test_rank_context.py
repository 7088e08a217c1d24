"""The addresses on which process groups of one machine listen."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from areno.engine.parallel.channels import meet
from areno.engine.parallel.rendezvous import FolderRendezvous


def _listening() -> set[str]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_group_listens_only_on_the_loopback_interface(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before, groups, where = _listening(), {}, FolderRendezvous(tmp_path)

    def join(rank: int) -> None:
        groups[rank] = meet(where, "group", rank, 2, torch.device("cpu"), patience=timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    opened = _listening() - before
    assert sorted(groups) == [0, 1]
    assert opened, "gloo listens for the other rank"
    assert {address.rpartition(":")[0] for address in opened} <= {"127.0.0.1", "::1"}
