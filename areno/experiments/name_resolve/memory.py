"""Names in the memory of one process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from areno.experiments.name_resolve.repository import Repository


@dataclass(frozen=True, slots=True)
class _Entry:
    value: str
    ends: float | None


class MemoryRepository(Repository):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, _Entry] = {}
        self._using = threading.Lock()

    def _write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        with self._using:
            if self._live(name) is not None and not replace:
                return False
            self._entries[name] = _Entry(value, None if ttl is None else time.monotonic() + ttl)
            return True

    def _read(self, name: str) -> str | None:
        with self._using:
            entry = self._live(name)
            return None if entry is None else entry.value

    def _remove(self, name: str) -> bool:
        with self._using:
            found = self._live(name) is not None
            self._entries.pop(name, None)
            return found

    def _under(self, root: str) -> list[str]:
        with self._using:
            names = [name for name in self._entries if name == root or name.startswith(f"{root}/")]
            return sorted(name for name in names if self._live(name) is not None)

    def _touch(self, name: str, ttl: float) -> bool:
        with self._using:
            entry = self._live(name)
            if entry is None:
                return False
            self._entries[name] = _Entry(entry.value, time.monotonic() + ttl)
            return True

    def _live(self, name: str) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is None or (entry.ends is not None and entry.ends <= time.monotonic()):
            return None
        return entry
