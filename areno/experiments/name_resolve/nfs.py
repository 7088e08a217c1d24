"""Names as files in a folder that several processes see: ``{root}/{name}/ENTRY``.

A file is written beside its place and then linked or renamed into it, so that nobody reads half of it and only one of two
that add the same name succeeds. It holds one line of JSON: the value, and its time to live; its age is its time of change.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path

from areno.experiments.name_resolve.repository import Repository

_FILE = "ENTRY"


class NfsRepository(Repository):
    """See the module's text.

    Args:
        root: the folder; made when first needed.
    """

    def __init__(self, root: str | Path) -> None:
        super().__init__()
        self.root = Path(root)

    def _file(self, name: str) -> Path:
        return self.root / name / _FILE

    def _write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        target = self._file(name)
        self._expire(target)
        while True:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{uuid.uuid4().hex}")
            try:
                draft.write_text(json.dumps({"value": value, "ttl": ttl}), encoding="utf-8")
                if replace:
                    os.replace(draft, target)
                else:
                    os.link(draft, target)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue  # somebody has removed the empty folder in the meantime
            finally:
                draft.unlink(missing_ok=True)

    def _read(self, name: str) -> str | None:
        return self._value(self._file(name))

    def _remove(self, name: str) -> bool:
        target = self._file(name)
        found = self._value(target) is not None
        target.unlink(missing_ok=True)
        self._tidy(target.parent)
        return found

    def _under(self, root: str) -> list[str]:
        files = (self.root / root).rglob(_FILE)
        names = [file.parent.relative_to(self.root).as_posix() for file in files if self._value(file) is not None]
        return sorted(names)

    def _touch(self, name: str, ttl: float) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._file(name))
            return True
        return False

    @staticmethod
    def _value(file: Path) -> str | None:
        try:
            age = time.time() - file.stat().st_mtime
            entry = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        value: str = entry["value"]
        return None if entry["ttl"] is not None and age >= entry["ttl"] else value

    def _expire(self, file: Path) -> None:
        if file.exists() and self._value(file) is None:
            file.unlink(missing_ok=True)

    def _tidy(self, folder: Path) -> None:
        """Remove folders that are empty now."""
        with contextlib.suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent
