"""Lets only one process at a time write to a run's directories, by an advisory lock (``flock``).

The lock is released when no process has the lock file open. Child processes close the lock file, so a killed process releases
the lock even if its children survive. The lock file remains after the run. While a process holds the lock, the lock file
contains the id and the host name of this process.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areno.errors import UsageError

_log = logging.getLogger(__name__)

_NAME = ".lock"
_HELD = (errno.EAGAIN, errno.EACCES)
_TRIES, _PAUSE_S = 10, 0.02
_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Close inherited lock files in a forked child, which would otherwise hold the locks after the exit of its parent."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def run_lock(folder: Path, remedy: str) -> Iterator[None]:
    """Hold the lock of a folder for the duration of the block. A missing folder is created.

    If the file system does not support locks, the function logs a warning and locks nothing.

    Raises:
        UsageError: another process holds the lock, or the folder is not writable. The message ends with ``remedy``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot create {error.filename or folder} ({error.strerror or error}); fix this error, {remedy}"
        ) from error
    _descriptors.add(descriptor)
    held = False
    try:
        held = _acquire(descriptor, folder, remedy)
        yield
    finally:
        _descriptors.discard(descriptor)
        if held:
            os.truncate(descriptor, 0)
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder. Also True if the file system does not support locks."""
    try:
        # These flags avoid blocking on a pipe, and following a link to another program's lock.
        descriptor = os.open(folder / _NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, remedy: str) -> bool:
    """Acquire the lock, and write the id and the host name of this process to the lock file.

    Return True if the lock was acquired, and False if the file system does not support locks.
    """
    try:
        _take(descriptor)
    except OSError as error:
        if error.errno in _HELD:
            holder = os.pread(descriptor, 500, 0).decode(errors="replace").strip() or "another process"
            raise UsageError(f"{holder} is writing to {folder}; wait until the other process ends, {remedy}") from error
        _log.warning(
            "%s: the file system does not support locks (%s); make sure that no other process writes to this folder",
            *(folder, error.strerror),
        )
        return False
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def _take(descriptor: int) -> None:
    """Take the lock, or raise OSError after about 0.2 s.

    The call retries, because :func:`is_locked` briefly holds the lock.
    """
    for _ in range(_TRIES - 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD:
                raise
        time.sleep(_PAUSE_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
