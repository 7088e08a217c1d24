"""Where the ranks of a group meet: in a folder of one machine, or by names that the processes of a run share."""

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
    """Travels to the ranks; ``name`` is that of a group, which is used once."""

    def store(self, name: str, rank: int, size: int, patience: timedelta) -> dist.Store:
        """The store of a group, in which its ranks leave their addresses."""

    def open(self, name: str) -> None:
        """Announce a group whose members will come one by one."""

    def come(self, name: str, member: int) -> None:
        """Say that a member is there. OSError: the group has been called off."""

    def members(self, name: str) -> int:
        """How many are there. OSError: the group has been called off."""

    def call_off(self, name: str) -> None:
        """Have nobody wait for a group any more."""


def own_address() -> str:
    """Address under which the ranks of other machines reach this process; loopback where all are on one."""
    return os.environ.get(NODE_ADDRESS, LOOPBACK)


@functools.cache
def node_id() -> str:
    """The same for processes of one machine, and only for those: they can share memory."""
    if given := os.environ.get(NODE):
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def serve_store(host: str, size: int, patience: timedelta) -> tuple[dist.Store, int]:
    """A store of this process for ``size`` members, and its port at an address of this machine."""
    # A socket of our own, because the store's would listen on every interface of the machine.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


@dataclass(frozen=True, slots=True)
class FolderRendezvous:
    """A private folder of this machine."""

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
    """Names below ``root``, which no other group of processes has ever used; rank 0 serves the store of a group."""

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
                f"rank {rank} on {node_id()} has not found rank 0 of {name} within {_MEET_S:g} s; do all machines use the same "
                f"names (cluster.name_resolve.type={self.options.type})? With nfs, all must see nfs_record_root"
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
            raise FileNotFoundError(f"the group {name} has been called off")
        return len(self._names.find_subtree(f"{self.root}/{name}/members"))

    def call_off(self, name: str) -> None:
        """See :class:`Rendezvous`."""
        self._names.clear_subtree(f"{self.root}/{name}")

    @property
    def _names(self) -> Repository:
        return _repository(self.options)
