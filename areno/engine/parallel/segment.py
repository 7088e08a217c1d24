"""Memory shared by the processes of one machine.

On Linux the memory is an anonymous file (memfd) that other processes open through ``/proc``. The kernel frees the file once no
process has the file open or mapped. The size of ``/dev/shm`` does not limit the size of the file. On other systems the memory
is a file in the temporary folder.
"""

import mmap
import os
import tempfile

import torch
from torch import Tensor

ANONYMOUS = hasattr(os, "memfd_create")
"""Whether a :class:`Segment` is an anonymous file (memfd). Otherwise, it is a file on disk."""


class Segment:
    """Shared memory of ``size`` bytes, created by this process."""

    def __init__(self, size: int) -> None:
        if ANONYMOUS:
            self._file = os.memfd_create("areno-memory")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="areno-memory-")
        os.ftruncate(self._file, size)

    def close(self) -> None:
        """Close the segment's file. Afterwards, no process can map the segment, but existing mappings stay valid."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if not ANONYMOUS:
                os.unlink(self.path)


def map_segment(path: str, size: int, *, writable: bool) -> mmap.mmap:
    """Map a segment. The mapping lasts as long as tensors use it.

    Without ``writable``, the mapping is copy-on-write, so writes do not change the segment.

    Raises OSError if the segment cannot be opened. Raises ValueError if the segment is smaller than ``size``.
    """
    file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
    finally:
        os.close(file)


def attach(path: str, size: int, *, writable: bool) -> Tensor:
    """Map a segment as a uint8 tensor [size]; see :func:`map_segment`."""
    return torch.frombuffer(map_segment(path, size, writable=writable), dtype=torch.uint8)
