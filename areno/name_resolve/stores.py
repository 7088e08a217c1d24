"""Where names are kept: in this process, or in files of a folder that all processes see.

A store does one step at a time and waits for nothing; what is built of the steps is the matter of
:class:`areno.name_resolve.repository.Repository`.
"""

import contextlib
import functools
import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Protocol

_FILE = "ENTRY"


class NameStore(Protocol):
    """Values by name; one whose time to live, in seconds, has passed is not there. Errors are ArenoErrors."""

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """Set a value; False if there is one and it is not to be replaced. Of several writers at once, one succeeds."""

    def read(self, name: str) -> str | None:
        """Value of a name; None if there is none."""

    def remove(self, name: str) -> bool:
        """Delete a value; whether there was one."""

    def under(self, root: str) -> list[str]:
        """Names with a value that are ``root`` or begin with its words."""

    def touch(self, name: str, ttl: float) -> bool:
        """Let the time to live of a value that this process has written begin anew; whether the value is still there."""


def is_under(name: str, root: str) -> bool:
    """Whether a name is ``root`` or begins with its words."""
    return name == root or name.startswith(f"{root}/")


class MemoryStore:
    """Names of one process; Ray runs it as an actor for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[str, float | None]] = {}  # value, and when it expires
        self._identity = uuid.uuid4().hex

    def identity(self) -> str:
        """Differs from that of every other store: after a restart an actor is another one, and empty."""
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
    """Names as files ``{root}/{name}/ENTRY``; the folder is made when first needed.

    A file is written beside its place and then linked or renamed into it, so that nobody reads half of it and only one of
    two that add the same name succeeds. It holds JSON, the value and its time to live in seconds; its age is its time of
    change, which is begun anew by touching it.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """See :class:`NameStore`."""
        target = self.root / name / _FILE
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
                continue  # somebody has removed the empty folder in the meantime
            finally:
                draft.unlink(missing_ok=True)

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        return self._value(self.root / name / _FILE)

    def remove(self, name: str) -> bool:
        """See :class:`NameStore`."""
        folder = self.root / name
        live = self.read(name) is not None
        (folder / _FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # until one is not empty
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
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.root / name / _FILE)
            return True
        return False

    @functools.cached_property
    def _ahead(self) -> float:
        """Seconds by which the clock of the file server, which dates files, is ahead of this machine's."""
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
