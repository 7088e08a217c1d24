"""Name stores in the memory of a process, or in files of a shared folder.

The operations of a store are atomic, and never wait for a value. :class:`areno.name_resolve.repository.Repository` builds on a
store.
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
from typing import Protocol

_FILE = "ENTRY"


class NameStore(Protocol):
    """Values by name, with an optional time to live in seconds.

    The methods raise ArenoError if a server cannot be reached, and OSError if files cannot be accessed.
    """

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """Set a value. Without ``replace``, return False if there is a value: of concurrent writers, only one succeeds."""

    def read(self, name: str) -> str | None:
        """Return the value of a name, or None if the name has no value."""

    def remove(self, name: str) -> bool:
        """Delete the value of a name. Return whether the name had a value."""

    def under(self, root: str) -> list[str]:
        """Return the names with a value: ``root`` and all names below ``root``."""

    def touch(self, name: str, ttl: float) -> bool:
        """Renew the time to live of a value that this process has written. Return whether the value still exists."""


def is_under(name: str, root: str) -> bool:
    """Whether a name is ``root`` or below ``root``."""
    return name == root or name.startswith(f"{root}/")


class MemoryStore:
    """Names in the memory of one process or of a Ray actor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[str, float | None]] = {}  # value, and when it expires
        self._identity = uuid.uuid4().hex

    def identity(self) -> str:
        """Return a unique id. A restarted actor is empty, and has a new id."""
        return self._identity

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """See :class:`NameStore`."""
        with self._lock:
            if not replace and self._live(name) is not None:
                return False
            self._entries[name] = (value, None if ttl is None else time.monotonic() + ttl)
            return True

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        with self._lock:
            return self._live(name)

    def remove(self, name: str) -> bool:
        """See :class:`NameStore`."""
        with self._lock:
            return self._live(name) is not None and self._entries.pop(name) is not None

    def under(self, root: str) -> list[str]:
        """See :class:`NameStore`."""
        with self._lock:
            return [name for name in list(self._entries) if is_under(name, root) and self._live(name) is not None]

    def touch(self, name: str, ttl: float) -> bool:
        """See :class:`NameStore`."""
        with self._lock:
            value = self._live(name)
            if value is not None:
                self._entries[name] = (value, time.monotonic() + ttl)
            return value is not None

    def _live(self, name: str) -> str | None:
        value, expires = self._entries.get(name, (None, None))
        if expires is not None and time.monotonic() >= expires:
            del self._entries[name]
            return None
        return value


class FileStore:
    """Names as files ``{root}/{name}/ENTRY``. Folders are created when needed.

    A file is written under a temporary name and then linked or renamed. Readers therefore never see a partial file, and
    without ``replace`` only one of two concurrent writers succeeds. A lock excludes other writers, because one of two writers
    that find an expired value would otherwise delete the new value of the other one. A file contains the value and the time
    to live in seconds as JSON. The time to live starts at the file's modification time, which :meth:`touch` renews.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """See :class:`NameStore`."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._locked():
            return self._write(self.root / name / _FILE, value, ttl, replace)

    def _write(self, target: Path, value: str, ttl: float | None, replace: bool) -> bool:
        if target.exists() and self._value(target) is None:
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
                continue  # another process has removed the empty folder
            finally:
                draft.unlink(missing_ok=True)

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        return self._value(self.root / name / _FILE)

    def remove(self, name: str) -> bool:
        """See :class:`NameStore`."""
        folder = self.root / name
        if not self.root.is_dir():
            return False
        with self._locked():
            live = self.read(name) is not None
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
        """See :class:`NameStore`."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            os.utime(self.root / name / _FILE)
            return True
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait until no other thread or process of this user writes, and exclude writers."""
        with (self.root / f".lock-{os.getuid()}").open("a") as lock:
            with contextlib.suppress(OSError):  # some cluster file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @functools.cached_property
    def _ahead(self) -> float:
        """Seconds by which the clock of the file server is ahead of the clock of this machine."""
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
            entry = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        value: str = entry["value"]
        ttl: float | None = entry["ttl"]
        return None if ttl is not None and time.time() + self._ahead - changed >= ttl else value
