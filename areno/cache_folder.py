"""The cache folder, and scratch folders of a process.

The cache is in ``$ARENO_CACHE_DIR``, ``$XDG_CACHE_HOME/areno`` or ``~/.cache/areno``. Scratch folders are temporary folders
locked by the process that created them. If this process is killed, the next process that creates a scratch folder deletes the
folders of the killed process.
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

_ABANDONED_S = 24 * 3600  # far longer than any build takes
_NEW_S = 60  # a younger folder may not have been locked yet
_SCRATCH, _OWNED = "areno-scratch-", ".owned"


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of cached file. Users may delete the folder at any time.

    Environment variables determine the location; see the module docstring.
    """
    if configured := os.environ.get("ARENO_CACHE_DIR"):
        root = Path(configured).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areno"
    return root / kind


def planted_problem(path: Path) -> str:
    """Return why a cached file of machine code cannot be trusted; empty if the file can be trusted.

    The file and each cache folder above it must belong to this user or root. None of them may be world-writable.
    """
    root = cache_folder("")
    for entry in (path, *(folder for folder in path.parents if folder.is_relative_to(root))):
        status = entry.lstat()
        if status.st_uid not in (0, os.geteuid()):
            return (
                f"{entry} is owned by user {status.st_uid}; delete it, or set ARENO_CACHE_DIR to a folder of your own"
            )
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            return f"{entry} is world-writable; delete it, so that areno creates it again"
    return ""


@contextmanager
def building_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, next to ``target``, in which ``target`` is built.

    Before the build, temporary folders of killed builds are deleted if they are more than a day old.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in target.parent.glob(".building-*"):
        with suppress(OSError):  # another build may be deleting it too
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as name:
        yield Path(name)


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder of this process. If the process is killed, a later process deletes the folder.

    Args:
        kind: part of the folder's name.
        root: parent folder; None means the system's temporary folder.
    """

    def __init__(self, kind: str, root: Path | None = None) -> None:
        _clear_abandoned(root or Path(tempfile.gettempdir()))
        super().__init__(prefix=f"{_SCRATCH}{kind}-", dir=root, ignore_cleanup_errors=True)
        descriptor = os.open(Path(self.name, _OWNED), os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):  # no locks on this file system: abandoned folders cannot be detected
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _clear_abandoned(root: Path) -> None:
    """Delete this user's scratch folders that no process has locked."""
    for folder in root.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _NEW_S:
                continue
            descriptor = os.open(folder / _OWNED, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
