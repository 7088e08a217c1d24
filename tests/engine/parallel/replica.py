"""Ranks of one replica, for tests of models without an engine; not in ``objects``, which must be quick to import."""

from __future__ import annotations

from pathlib import Path

import torch

from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import connect
from areno.engine.parallel.rendezvous import FolderRendezvous


class Member:
    """One of the ranks."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.peers = connect(Layout(1, size), rank, FolderRendezvous(folder), torch.device("cpu"))

    def apply(self, function, *arguments):
        return function(self.peers, *arguments)


def members(size: int, folder: Path):
    """Return the factories of the ranks."""
    return [lambda _send, rank=rank: Member(rank, size, folder) for rank in range(size)]
