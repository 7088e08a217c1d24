"""Name stores in the memory of a process, or in files of a shared folder.

The operations of a store are atomic, and never wait for a value. To wait for a value, use
:meth:`areno.name_resolve.repository.Repository.wait`.
"""

import contextlib
import fcntl
import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

_FILE = ".entry"  # no name has a word that starts with a dot


class NameStore(Protocol):
    """Stores values by name, with an optional time to live in seconds.

    The methods raise ArenoError if a server cannot be reached, and OSError if files cannot be accessed.
    """

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """Set the value of a name, and return True.

        If the name already has a value and ``replace`` is False, keep the existing value and return False.
        If several processes write concurrently without ``replace``, only one write succeeds.
        """

    def read(self, name: str) -> str | None:
        """Return the value of a name, or None if the name has no value."""

    def remove(self, name: str, own: bool = False) -> bool:
        """Delete the value of a name, and return whether a value was deleted.

        With ``own``, delete only a value that this process has written.
        """

    def under(self, root: str) -> list[str]:
        """Return the names that have a value, among ``root`` and all names below ``root``."""

    def touch(self, name: str, ttl: float) -> bool:
        """Renew the time to live of a value that this process has written. Return whether the value still exists.

        The result is also False if another process has replaced the value.
        """


def is_under(name: str, root: str) -> bool:
    """Whether a name is ``root`` or below ``root``."""
    return name == root or name.startswith(f"{root}/")


class MemoryStore:
    """Stores names in the memory of a process or of a Ray actor.

    In a Ray actor, the argument ``owner`` of a method identifies the process that calls this method.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[str, float | None, str]] = {}  # value, when it expires, and owner
        self._identity = uuid.uuid4().hex

    def identity(self) -> str:
        """Return the unique id of this store.

        If the store is in a Ray actor and the actor restarts, the actor creates an empty store with a new id.
        """
        return self._identity

    def write(self, name: str, value: str, ttl: float | None, replace: bool, owner: str = "") -> bool:
        """See :class:`NameStore`."""
        with self._lock:
            if not replace and self._live(name) is not None:
                return False
            self._entries[name] = (value, None if ttl is None else time.monotonic() + ttl, owner)
            return True

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        with self._lock:
            return self._live(name)

    def remove(self, name: str, own: bool = False, owner: str = "") -> bool:
        """See :class:`NameStore`."""
        with self._lock:
            if self._live(name) is None or (own and self._entries[name][2] != owner):
                return False
            del self._entries[name]
            return True

    def under(self, root: str) -> list[str]:
        """See :class:`NameStore`."""
        with self._lock:
            return [name for name in list(self._entries) if is_under(name, root) and self._live(name) is not None]

    def touch(self, name: str, ttl: float, owner: str = "") -> bool:
        """See :class:`NameStore`."""
        with self._lock:
            value = self._live(name)
            if value is None or self._entries[name][2] != owner:
                return False
            self._entries[name] = (value, time.monotonic() + ttl, owner)
            return True

    def _live(self, name: str) -> str | None:
        value, expires, _ = self._entries.get(name, (None, None, ""))
        if expires is not None and time.monotonic() >= expires:
            del self._entries[name]
            return None
        return value


class FileStore:
    """Stores names as files ``{root}/{name}/.entry``. Folders are created when needed.

    A file is written under a temporary name and then linked or renamed. Readers therefore never see a partial file.

    A writer holds a lock, so that other threads and processes of the same operating-system user cannot write at the same
    time. Without the lock, two writers could find the same expired value, and the second writer would delete the new value
    of the first writer. Each user has a separate lock file, so processes of different users do not exclude each other.

    A file contains JSON with the value, the time to live in seconds and a unique mark, by which a process recognizes a
    value that it has written. The time to live starts at the file's modification time, which :meth:`touch` renews.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._marks: dict[str, str] = {}  # written by this process

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """See :class:`NameStore`."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._locked():
            return self._write(name, value, ttl, replace)

    def _write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        target, mark = self.root / name / _FILE, uuid.uuid4().hex
        if target.exists() and self._value(target) is None:
            target.unlink(missing_ok=True)
        while True:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{mark}")
            try:
                draft.write_text(json.dumps({"value": value, "ttl": ttl, "mark": mark}), encoding="utf-8")
                (os.replace if replace else os.link)(draft, target)
                self._marks[name] = mark
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue  # another process has removed the empty folder
            finally:
                draft.unlink(missing_ok=True)

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        return self._value(self.root / name / _FILE)

    def remove(self, name: str, own: bool = False) -> bool:
        """See :class:`NameStore`."""
        folder, mark = self.root / name, self._marks.pop(name, None)
        if not self.root.is_dir():
            return False
        with self._locked():
            live = self.read(name) is not None
            if own and live and _entry(folder / _FILE).get("mark") != mark:
                return False
            (folder / _FILE).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # until a folder is not empty
                while folder != self.root:
                    folder.rmdir()
                    folder = folder.parent
        return live

    def under(self, root: str) -> list[str]:
        """See :class:`NameStore`."""
        files = (self.root / root).rglob(_FILE)
        return [file.parent.relative_to(self.root).as_posix() for file in files if self._value(file) is not None]

    def touch(self, name: str, ttl: float) -> bool:
        """See :class:`NameStore`. An expired value is renewed, too, unless another process has replaced or removed it."""
        file = self.root / name / _FILE
        with contextlib.suppress(FileNotFoundError), self._locked():
            if _entry(file).get("mark") == self._marks.get(name, ""):
                os.utime(file)
                return True
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / f".lock-{os.getuid()}").open("a") as lock:
            with contextlib.suppress(OSError):  # some cluster file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @functools.cached_property
    def _ahead(self) -> float:
        """Number of seconds by which the clock of the file server is ahead of the clock of this machine."""
        self.root.mkdir(parents=True, exist_ok=True)
        probe = self.root / f".{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime - time.time()
        finally:
            probe.unlink(missing_ok=True)

    def _value(self, file: Path) -> str | None:
        try:
            changed = file.stat().st_mtime
            entry = _entry(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        value: str = entry["value"]
        ttl: float | None = entry["ttl"]
        return None if ttl is not None and time.time() + self._ahead - changed >= ttl else value


def _entry(file: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return entry
