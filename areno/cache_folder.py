"""Where areno keeps what it can make again: below ``$ARENO_CACHE_DIR``, ``$XDG_CACHE_HOME/areno`` or ``~/.cache/areno``."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Folder for one kind of files, which may be deleted at any time; the environment is read at each call."""
    if own := os.environ.get("ARENO_CACHE_DIR"):
        root = Path(own).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areno"
    return root / kind
