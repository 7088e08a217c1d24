"""Names with values that the processes of an experiment share: one repository per process, chosen by configuration.

A name is a path of words such as ``user/experiment/trial/workers/rollout/0``; its value is text. ``memory`` is for one
process, ``nfs`` for all that see the same folder.
"""

import contextlib
import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from areno.cache_folder import ScratchFolder
from areno.errors import ArenoError, UsageError

_LATER = ("etcd3", "ray")
_FILE = "ENTRY"


class NameEntryExists(ArenoError):  # noqa: N818 - the documented name
    """The name has a value already."""


class NameEntryNotFound(ArenoError):  # noqa: N818 - the documented name
    """The name has no value."""


class Store:
    """Names as files ``{root}/{name}/ENTRY``; the folder is made when first needed.

    A file is written beside its place and then linked or renamed into it, so that nobody reads half of it and only one of
    two that add the same name succeeds. It holds JSON, the value and its time to live in seconds; its age is its time of
    change, which is begun anew by touching it.
    """

    def __init__(self, root: str | Path) -> None:
        self._shared = root

    @functools.cached_property
    def root(self) -> Path:
        """The shared folder; without one a folder of this process alone, which goes with it."""
        if not self._shared:
            self._own = ScratchFolder("names")
        return Path(self._shared or self._own.name)

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """Set a value; False if there is one and it is not to be replaced. Of several writers at once, one succeeds."""
        target = self.root / name / _FILE
        if target.exists() and _value(target) is None:
            target.unlink(missing_ok=True)
        while True:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{uuid.uuid4().hex}")
            try:
                draft.write_text(json.dumps({"value": value, "ttl": ttl}), encoding="utf-8")
                (os.replace if replace else os.link)(draft, target)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue  # somebody has removed the empty folder in the meantime
            finally:
                draft.unlink(missing_ok=True)

    def read(self, name: str) -> str | None:
        """Value of a name; None if there is none, or if it has expired."""
        return _value(self.root / name / _FILE)

    def remove(self, name: str) -> bool:
        """Delete a value; whether there was one."""
        folder = self.root / name
        live = self.read(name) is not None
        (folder / _FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # until one is not empty
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent
        return live

    def under(self, root: str) -> list[str]:
        """Names of live values that are ``root`` or begin with its words."""
        files = (self.root / root).rglob(_FILE)
        return [file.parent.relative_to(self.root).as_posix() for file in files if _value(file) is not None]

    def touch(self, name: str, ttl: float) -> bool:
        """Let the time to live begin anew; whether the value is still there."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.root / name / _FILE)
            return True
        return False


def _value(file: Path) -> str | None:
    try:
        age = time.time() - file.stat().st_mtime
        entry = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    value: str = entry["value"]
    return None if entry["ttl"] is not None and age >= entry["ttl"] else value


class Repository:
    """Names and their values in a store.

    A value that was added with a time to live is kept alive by a thread of the process that has added it, and is gone soon
    after that process, whatever ends it.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._own: set[str] = set()
        self._alive: dict[str, threading.Event] = {}  # set where a value is no longer to be kept alive

    def add(
        self,
        name: str,
        value: str,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
    ) -> None:
        """Give a name, words with slashes between them, a value.

        Args:
            delete_on_exit: :meth:`reset` deletes it.
            keepalive_ttl: seconds after which it is gone if this process has died; None never.
            replace: a name that has a value gets this one; else it is a NameEntryExists.
        """
        name = _normal(name)
        if keepalive_ttl is not None and keepalive_ttl <= 0:
            raise UsageError(f"keepalive_ttl={keepalive_ttl}: give seconds above 0, or None")
        if not self.store.write(name, str(value), keepalive_ttl, replace):
            raise NameEntryExists(f"the name {name} has a value already; replace=True would replace it")
        self._forget(name)
        if delete_on_exit:
            self._own.add(name)
        if keepalive_ttl is not None:
            ended = self._alive[name] = threading.Event()
            arguments = (self.store, name, keepalive_ttl, ended)
            threading.Thread(target=_keep_alive, args=arguments, name="areno-names", daemon=True).start()

    def add_subentry(
        self, name: str, value: str, delete_on_exit: bool = True, keepalive_ttl: float | None = None
    ) -> str:
        """Give a new name below ``name`` a value; returns that name."""
        entry = f"{_normal(name)}/{uuid.uuid4().hex[:12]}"
        self.add(entry, value, delete_on_exit, keepalive_ttl)
        return entry

    def delete(self, name: str) -> None:
        """Delete a value; raises :class:`NameEntryNotFound` if there is none."""
        name = _normal(name)
        self._forget(name)
        if not self.store.remove(name):
            raise NameEntryNotFound(f"the name {name} has no value")

    def get(self, name: str) -> str:
        """Value of a name; raises :class:`NameEntryNotFound` if it has none."""
        value = self.store.read(_normal(name))
        if value is None:
            raise NameEntryNotFound(f"the name {name} has no value")
        return value

    def get_subtree(self, name_root: str) -> list[str]:
        """Values of a name and of all below it, in the order of :meth:`find_subtree`."""
        values = (self.store.read(name) for name in self.find_subtree(name_root))
        return [value for value in values if value is not None]

    def find_subtree(self, name_root: str) -> list[str]:
        """Names with a value: the name itself and all below it, sorted."""
        return sorted(self.store.under(_normal(name_root)))

    def wait(self, name: str, timeout: float | None = None, poll_frequency: float = 0.1) -> str:
        """Value of a name as soon as it has one; TimeoutError after so many seconds, which None does not bound."""
        name, began = _normal(name), time.monotonic()
        while (value := self.store.read(name)) is None:
            if timeout is not None and time.monotonic() - began >= timeout:
                raise TimeoutError(f"the name {name} has got no value within {timeout:g} s")
            time.sleep(poll_frequency)
        return value

    def watch_names(
        self,
        names: str | Sequence[str],
        call_back: Callable[[], None],
        poll_frequency: float = 1.0,
        wait_timeout: float = 60.0,
    ) -> None:
        """Call back once, in a thread, as soon as one of some names has no value any more.

        A name that has none yet is waited for as long as ``wait_timeout``, in seconds; then it counts as gone.
        """
        watched = [_normal(name) for name in ([names] if isinstance(names, str) else names)]

        def watch() -> None:
            with contextlib.suppress(TimeoutError):
                for name in watched:
                    self.wait(name, wait_timeout, poll_frequency)
                while all(self.store.read(name) is not None for name in watched):
                    time.sleep(poll_frequency)
            call_back()

        threading.Thread(target=watch, name="areno-names-watch", daemon=True).start()

    def clear_subtree(self, name_root: str) -> None:
        """Delete the value of a name and all below it."""
        for name in self.find_subtree(name_root):
            self._forget(name)
            self.store.remove(name)

    def reset(self) -> None:
        """Delete what this process has added with ``delete_on_exit``, and keep nothing alive any more."""
        own = list(self._own)
        for name in {*own, *self._alive}:
            self._forget(name)
        for name in own:
            self.store.remove(name)

    def _forget(self, name: str) -> None:
        self._own.discard(name)
        if (ended := self._alive.pop(name, None)) is not None:
            ended.set()


def _keep_alive(store: Store, name: str, ttl: float, ended: threading.Event) -> None:
    while not ended.wait(min(ttl / 4, 1.0)) and store.touch(name, ttl):
        pass


def _normal(name: str) -> str:
    """A name without slashes at its ends."""
    words = name.strip("/").split("/")
    if any(word in ("", ".", "..") or "\0" in word for word in words):
        raise UsageError(f"{name!r} is no name: give words with one slash between them, such as experiment/trial/key")
    return "/".join(words)


def make_store(kind: str, nfs_record_root: str | Path = "") -> Store:
    """The store ``memory``, or ``nfs`` with its folder; raises UsageError for another one, or without a folder."""
    if kind == "memory":
        return Store("")
    if kind in _LATER:
        raise UsageError(f"name_resolve.type={kind} is not there yet; use nfs, or memory for a single process")
    if kind != "nfs":
        raise UsageError(f"name_resolve.type={kind}: use memory or nfs")
    if not str(nfs_record_root):
        raise UsageError("name_resolve.type=nfs needs a folder: set name_resolve.nfs_record_root")
    return Store(nfs_record_root)


_names = Repository(make_store("memory"))
add, add_subentry, delete, reset = _names.add, _names.add_subentry, _names.delete, _names.reset
get, get_subtree, find_subtree = _names.get, _names.get_subtree, _names.find_subtree
wait, watch_names, clear_subtree = _names.wait, _names.watch_names, _names.clear_subtree


def reconfigure(kind: str, nfs_record_root: str | Path = "") -> None:
    """Use another store from now on; what this process has added to the one before is deleted there."""
    store = make_store(kind, nfs_record_root)
    _names.reset()
    _names.store = store
