"""Where areno keeps what it can make again, and what only a process of it needs.

The first lies below ``$ARENO_CACHE_DIR``, ``$XDG_CACHE_HOME/areno`` or ``~/.cache/areno``. The second are folders in the
temporary folder, locked by their owner: one whose owner was killed is deleted by the next process that makes one.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# No build takes nearly as long.
_ABANDONED_S = 24 * 3600
# Longer than a new folder is without its lock.
_NEW_S = 60
_SCRATCH, _OWNED = "areno-scratch-", ".owned"


def cache_folder(kind: str) -> Path:
    """Folder for one kind of files, which may be deleted at any time; the environment is read at each call."""
    if own := os.environ.get("ARENO_CACHE_DIR"):
        root = Path(own).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areno"
    return root / kind


def planted_problem(path: Path) -> str:
    """Why a cached file is not to be trusted: another user owns or may write to it or a folder of the cache above it; or "".

    What is loaded from a cache is machine code.
    """
    root = cache_folder("")
    for place in (path, *(folder for folder in path.parents if folder.is_relative_to(root))):
        found = place.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {found.st_uid}; delete it, or set ARENO_CACHE_DIR to a folder of your own"
        if found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode):
            return f"{place} can be written to by every user; delete it and chmod o-w {root}"
    return ""


@contextmanager
def building_folder(target: Path) -> Iterator[Path]:
    """A folder to build ``target`` in, on its file system; gone afterwards, as are those that killed builds have left."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in target.parent.glob(".building-*"):
        with suppress(OSError):  # another build may be clearing them as well
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        yield Path(folder)


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A folder of this process; gone when it is cleaned up, or when a later one finds it abandoned.

    Args:
        kind: a word for its name.
        root: the folder that it lies in; None is the temporary folder.
    """

    def __init__(self, kind: str, root: Path | None = None) -> None:
        _clear_abandoned(root or Path(tempfile.gettempdir()))
        super().__init__(prefix=f"{_SCRATCH}{kind}-", dir=root, ignore_cleanup_errors=True)
        descriptor = os.open(Path(self.name, _OWNED), os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):  # a file system without locks, where no folder can be known to be abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _clear_abandoned(root: Path) -> None:
    """Delete this user's scratch folders that no living process has locked."""
    for folder in root.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _NEW_S:
                continue
            descriptor = os.open(folder / _OWNED, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
