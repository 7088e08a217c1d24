"""Where areno keeps what it can make again: below ``$ARENO_CACHE_DIR``, ``$XDG_CACHE_HOME/areno`` or ``~/.cache/areno``."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

# No build takes nearly as long.
_ABANDONED_S = 24 * 3600


def cache_folder(kind: str) -> Path:
    """Folder for one kind of files, which may be deleted at any time; the environment is read at each call."""
    if own := os.environ.get("ARENO_CACHE_DIR"):
        root = Path(own).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areno"
    return root / kind


@contextmanager
def building_folder(target: Path) -> Iterator[Path]:
    """A folder to build ``target`` in, on its file system; gone afterwards, as are those that killed builds have left."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in target.parent.glob(".building-*"):
        with suppress(OSError):  # another build may be clearing them as well
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)
    with TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        yield Path(folder)
