"""Memory that the processes of a machine share.

On Linux it is a file without a name, which others open through ``/proc``: it is gone with the last process that has it
open, whatever ends them, and the size of ``/dev/shm`` does not limit it. Elsewhere it is a file in the temporary folder.
"""

import mmap
import os
import tempfile

import torch
from torch import Tensor

NAMELESS = hasattr(os, "memfd_create")
"""Whether it needs no file on a disk."""


class Segment:
    """Shared memory of this process, of so many bytes."""

    def __init__(self, size: int) -> None:
        if NAMELESS:
            self._file = os.memfd_create("areno-memory")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="areno-memory-")
        os.ftruncate(self._file, size)

    def close(self) -> None:
        """Let go of it; who has it open keeps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if not NAMELESS:
                os.unlink(self.path)


def mapped(path: str, size: int, *, writable: bool) -> mmap.mmap:
    """The memory of a segment, until the last tensor in it is gone; without ``writable``, changes stay with this process.

    Raises OSError: it cannot be opened; ValueError: it is smaller.
    """
    file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
    finally:
        os.close(file)


def attach(path: str, size: int, *, writable: bool) -> Tensor:
    """The same as uint8 [size]."""
    return torch.frombuffer(mapped(path, size, writable=writable), dtype=torch.uint8)
