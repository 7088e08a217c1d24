"""Names with values that the processes of an experiment share: one repository per process, chosen by configuration.

A name is a path of words such as ``user/experiment/trial/workers/rollout/0``; its value is text. ``memory`` is for one
process, ``nfs`` for all that see the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from areno.errors import UsageError
from areno.experiments.name_resolve.memory import MemoryRepository
from areno.experiments.name_resolve.nfs import NfsRepository
from areno.experiments.name_resolve.repository import NameEntryExists, NameEntryNotFound, Repository

__all__ = [
    "MemoryRepository",
    "NameEntryExists",
    "NameEntryNotFound",
    "NfsRepository",
    "Repository",
    "add",
    "add_subentry",
    "clear_subtree",
    "delete",
    "find_subtree",
    "get",
    "get_subtree",
    "make_repository",
    "reconfigure",
    "reset",
    "wait",
    "watch_names",
]

_LATER = ("etcd3", "ray")
_current: Repository = MemoryRepository()


def make_repository(kind: str, nfs_record_root: str | Path = "") -> Repository:
    """A repository.

    Args:
        kind: ``memory`` or ``nfs``.
        nfs_record_root: folder of ``nfs``.

    Raises:
        UsageError: there is no such kind, or it is not there yet, or ``nfs`` has no folder.
    """
    if kind == "memory":
        return MemoryRepository()
    if kind == "nfs":
        if not str(nfs_record_root):
            raise UsageError("name_resolve.type=nfs needs a folder: set name_resolve.nfs_record_root")
        return NfsRepository(nfs_record_root)
    if kind in _LATER:
        raise UsageError(f"name_resolve.type={kind} is not there yet; use nfs, or memory for a single process")
    raise UsageError(f"name_resolve.type={kind}: use memory or nfs")


def reconfigure(kind: str, nfs_record_root: str | Path = "") -> None:
    """Use another repository from now on; what this process has added to the one before is deleted there."""
    global _current
    chosen = make_repository(kind, nfs_record_root)
    _current.reset()
    _current = chosen


def add(
    name: str,
    value: str,
    delete_on_exit: bool = True,
    keepalive_ttl: float | None = None,
    replace: bool = False,
) -> None:
    """See :meth:`Repository.add`."""
    _current.add(name, value, delete_on_exit, keepalive_ttl, replace)


def add_subentry(name: str, value: str, delete_on_exit: bool = True, keepalive_ttl: float | None = None) -> str:
    """See :meth:`Repository.add_subentry`."""
    return _current.add_subentry(name, value, delete_on_exit, keepalive_ttl)


def delete(name: str) -> None:
    """See :meth:`Repository.delete`."""
    _current.delete(name)


def get(name: str) -> str:
    """See :meth:`Repository.get`."""
    return _current.get(name)


def get_subtree(name_root: str) -> list[str]:
    """See :meth:`Repository.get_subtree`."""
    return _current.get_subtree(name_root)


def find_subtree(name_root: str) -> list[str]:
    """See :meth:`Repository.find_subtree`."""
    return _current.find_subtree(name_root)


def wait(name: str, timeout: float | None = None, poll_frequency: float = 0.1) -> str:
    """See :meth:`Repository.wait`."""
    return _current.wait(name, timeout, poll_frequency)


def watch_names(
    names: str | Sequence[str],
    call_back: Callable[[], None],
    poll_frequency: float = 1.0,
    wait_timeout: float = 60.0,
) -> None:
    """See :meth:`Repository.watch_names`."""
    _current.watch_names(names, call_back, poll_frequency, wait_timeout)


def clear_subtree(name_root: str) -> None:
    """See :meth:`Repository.clear_subtree`."""
    _current.clear_subtree(name_root)


def reset() -> None:
    """See :meth:`Repository.reset`."""
    _current.reset()
