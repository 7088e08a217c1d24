"""Memory that the processes of a machine share.

On Linux it is a file without a name, which others open through ``/proc``: it is gone with the last process that has it
open, whatever ends them, and the size of ``/dev/shm`` does not limit it. Elsewhere it is a file in the temporary folder.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from areno.experiments.fleet.tensors import TensorSpec

_ALIGN = 64


class Segment:
    """Shared memory of this process.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._named = ""
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("areno-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="areno-weights-")
            self._named = self.path
        os.ftruncate(self._file, size)

    def close(self) -> None:
        """Let go of it; who has it open keeps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if self._named:
                os.unlink(self._named)


def attach(path: str, size: int, *, writable: bool) -> Tensor:
    """The memory of a segment as uint8 [size]; without ``writable``, changes would stay with this process."""
    file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        return torch.frombuffer(mmap.mmap(file, size, access=access), dtype=torch.uint8)
    finally:
        os.close(file)


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins, and how many bytes all take."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // _ALIGN) * _ALIGN
    return offsets, max(end, _ALIGN)


def view(memory: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor in memory uint8 [n]."""
    return memory[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
