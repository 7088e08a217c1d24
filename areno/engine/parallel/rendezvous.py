"""Lets the ranks of a group find each other: in a folder on one machine, or through the name registry of a run."""

import functools
import os
import platform
import shutil
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from areno.errors import EngineError
from areno.launch.launcher import NODE
from areno.launch.links import NODE_ADDRESS
from areno.name_resolve import NameOptions, Repository

LOOPBACK = "127.0.0.1"
_PORT_TTL_S, _MEET_S = 60.0, 120.0


class Rendezvous(Protocol):
    """Connects the ranks of a group; picklable. ``name`` identifies the group, so each group needs a different name."""

    def store(self, name: str, rank: int, size: int, patience: timedelta) -> dist.Store:
        """Return the store through which the ranks of a group exchange addresses."""

    def open(self, name: str) -> None:
        """Announce a new group, so that members can join the group."""

    def come(self, name: str, member: int) -> None:
        """Register a member. Raises OSError if the group has been cancelled."""

    def members(self, name: str) -> int:
        """Return the number of registered members. Raises OSError if the group has been cancelled."""

    def call_off(self, name: str) -> None:
        """Cancel a group, so that its members stop waiting."""


def own_address() -> str:
    """Return the address at which the other processes of a run reach this process.

    Without a cluster launcher, all processes are on one machine, and the address is the loopback address.
    """
    return os.environ.get(NODE_ADDRESS, LOOPBACK)


@functools.cache
def node_id() -> str:
    """Return an identifier of this machine. Processes with the same identifier can share memory."""
    if node := os.environ.get(NODE):
        return node
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def serve_store(host: str, size: int, patience: timedelta) -> tuple[dist.Store, int]:
    """Serve a store for ``size`` members at ``host``; return the store and its port."""
    # The store's own socket would listen on every interface of the machine.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


@dataclass(frozen=True, slots=True)
class FolderRendezvous:
    """Rendezvous in a private folder on this machine."""

    folder: Path

    def store(self, name: str, rank: int, size: int, patience: timedelta) -> dist.Store:
        """See :class:`Rendezvous`."""
        return dist.FileStore(str(self.folder / name), size)

    def open(self, name: str) -> None:
        """See :class:`Rendezvous`."""
        self._members(name).mkdir()

    def come(self, name: str, member: int) -> None:
        """See :class:`Rendezvous`."""
        (self._members(name) / str(member)).touch()

    def members(self, name: str) -> int:
        """See :class:`Rendezvous`."""
        return len(os.listdir(self._members(name)))

    def call_off(self, name: str) -> None:
        """See :class:`Rendezvous`."""
        shutil.rmtree(self._members(name))

    def _members(self, name: str) -> Path:
        return self.folder / f"{name}.members"


@functools.cache
def _repository(options: NameOptions) -> Repository:
    return Repository(options.open())


@dataclass(frozen=True, slots=True)
class NamedRendezvous:
    """A rendezvous through the name registry, under names that start with ``root``. Rank 0 serves the store.

    Each group of processes has its own ``root``.
    """

    options: NameOptions
    root: str

    def store(self, name: str, rank: int, size: int, patience: timedelta) -> dist.Store:
        """See :class:`Rendezvous`."""
        key, host = f"{self.root}/{name}/store", own_address()
        if rank == 0:
            served, port = serve_store(host, size, patience)
            self._names.add(key, f"{host}:{port}", keepalive_ttl=_PORT_TTL_S)
            return served
        try:
            address = self._names.wait(key, _MEET_S)
        except TimeoutError as error:
            raise EngineError(
                f"rank {rank} on {node_id()} has not found rank 0 of the group {name} within {_MEET_S:g} s; check that all "
                f"machines use the same name registry (cluster.name_resolve.type={self.options.type}); with nfs, also check "
                "that all machines can access nfs_record_root"
            ) from error
        host, _, dialled = address.rpartition(":")
        return dist.TCPStore(host, int(dialled), size, False, patience)

    def open(self, name: str) -> None:
        """See :class:`Rendezvous`."""
        self._names.add(f"{self.root}/{name}/open", str(time.time()), keepalive_ttl=_PORT_TTL_S)

    def come(self, name: str, member: int) -> None:
        """See :class:`Rendezvous`."""
        self.members(name)
        self._names.add(f"{self.root}/{name}/members/{member}", str(member), keepalive_ttl=_PORT_TTL_S)

    def members(self, name: str) -> int:
        """See :class:`Rendezvous`."""
        if not self._names.find_subtree(f"{self.root}/{name}/open"):
            raise FileNotFoundError(f"the group {name} has been cancelled")
        return len(self._names.find_subtree(f"{self.root}/{name}/members"))

    def call_off(self, name: str) -> None:
        """See :class:`Rendezvous`."""
        self._names.clear_subtree(f"{self.root}/{name}")

    @property
    def _names(self) -> Repository:
        return _repository(self.options)
