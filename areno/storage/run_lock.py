"""One program at a time writes to a run's directories: an advisory lock (``flock``) that ends with the process that holds it.

Special here: the lock belongs to the open file, which no program that the run starts inherits, so whatever ends the run
lets go of it. The lock's file stays; while it is held it says who holds it.
"""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areno.errors import UsageError

_log = logging.getLogger(__name__)

_NAME = ".lock"
_HELD = (errno.EAGAIN, errno.EACCES)
_descriptors: set[int] = set()


def _close_in_child() -> None:
    """A forked child shares its parent's locks, and would hold them longer than the parent lives."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def run_lock(folder: Path, remedy: str) -> Iterator[None]:
    """Hold the lock of a folder, which is made where it is missing; without locks in its file system that is warned about.

    Raises:
        UsageError: another program holds the lock (``remedy`` follows "wait for its end, "), or the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be made ({error.strerror or error}); {remedy}") from error
    _descriptors.add(descriptor)
    held = False
    try:
        held = _take(descriptor, folder, remedy)
        yield
    finally:
        _descriptors.discard(descriptor)
        if held:
            os.truncate(descriptor, 0)
        os.close(descriptor)


def _take(descriptor: int, folder: Path, remedy: str) -> bool:
    """Take the lock and write down who has it; False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            holder = os.pread(descriptor, 500, 0).decode(errors="replace").strip() or "another process"
            raise UsageError(f"{folder} is being written to by {holder}; wait for its end, {remedy}") from error
        _log.warning(
            "%s: the file system has no locks (%s), so nothing keeps a second program from writing there too",
            *(folder, error.strerror),
        )
        return False
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True
