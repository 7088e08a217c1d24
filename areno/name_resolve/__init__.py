"""Name service, in which the processes of an experiment store values by name.

A name is a path such as ``user/experiment/trial/workers/rollout/0``, and a value is a string. The store ``memory`` works
within one process, ``nfs`` with a shared folder, ``etcd3`` with an etcd server, and ``ray`` in a Ray cluster. All functions of
this module use the same store, which :func:`reconfigure` replaces.
"""

from dataclasses import dataclass

from areno.errors import UsageError
from areno.name_resolve.repository import NameEntryExists, NameEntryNotFound, Repository
from areno.name_resolve.stores import FileStore, MemoryStore, NameStore

__all__ = ["NameEntryExists", "NameEntryNotFound", "NameOptions", "Repository", "reconfigure"]


@dataclass(frozen=True, slots=True)
class NameOptions:
    """Settings of ``cluster.name_resolve``."""

    type: str = "memory"
    nfs_record_root: str = ""
    etcd3_addr: str = "localhost:2379"
    ray_actor_name: str = "ray_kv_store"

    def open(self) -> NameStore:
        """Open the store that the settings select.

        Raises:
            UsageError: the type is unknown, or this machine cannot use the store.
        """
        if self.type == "memory":
            return MemoryStore()
        if self.type == "nfs":
            if not self.nfs_record_root:
                raise UsageError("name_resolve.type=nfs needs a folder; set name_resolve.nfs_record_root")
            return FileStore(self.nfs_record_root)
        if self.type == "etcd3":
            from areno.name_resolve.etcd_store import EtcdStore

            return EtcdStore(self.etcd3_addr)
        if self.type == "ray":
            from areno.name_resolve.ray_store import RayStore

            return RayStore(self.ray_actor_name)
        raise UsageError(f"name_resolve.type={self.type} is unknown; use memory, nfs, etcd3 or ray")


_names = Repository(MemoryStore())
add, add_subentry, delete, reset = _names.add, _names.add_subentry, _names.delete, _names.reset
get, get_subtree, find_subtree = _names.get, _names.get_subtree, _names.find_subtree
wait, watch_names, clear_subtree = _names.wait, _names.watch_names, _names.clear_subtree


def reconfigure(options: NameOptions) -> None:
    """Call ``reset`` on the current store, then let all functions of this module use the store that ``options`` selects."""
    store = options.open()
    _names.reset()
    _names.store = store
