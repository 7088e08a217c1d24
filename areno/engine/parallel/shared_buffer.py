"""Sums and weights of ranks on the CPUs of one machine, in memory that all of them see: nothing is sent.

Each rank adds its numbers up in a buffer of its own, which the others can read. When all are done, each rank sums its part
over the buffers: first its own entries, then those of the others in the order of ranks, so equal numbers give equal sums.
Each part is summed by one rank, so all ranks see the same ones. Ranks wait for each other in gloo's sockets: waiting takes
no processor time, and a rank that has ended breaks the connection, which is an error on the others. The memory has no name
(see :mod:`areno.engine.parallel.segment`), so none is left behind, whatever ends a rank.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from areno.engine.parallel.peers import Common, Group, Sums
from areno.engine.parallel.segment import NAMELESS, Segment, mapped


class SharedGroup(Group):
    """A group whose ranks may share memory; where the system does not let them, it is like any other group."""

    def sums(self, count: int, device: torch.device) -> Sums | None:
        """See :class:`areno.engine.parallel.peers.Channel`."""
        size = count * torch.float32.itemsize
        memories = self._memories([size] * self.size) if device.type == "cpu" else []
        return _SharedSums(self, [torch.frombuffer(one, dtype=torch.float32) for one in memories]) if memories else None

    def common(self, count: int, dtype: torch.dtype) -> Common | None:
        """See :class:`areno.engine.parallel.peers.Channel`."""
        memories = self._memories([count * dtype.itemsize])
        return _SharedMemory(self, memories[0], dtype) if memories else None

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.smallest(0)

    def _memories(self, sizes: list[int]) -> list[mmap.mmap]:
        """Memory of so many bytes of each of the first ranks, open on all; nothing if one rank has not been able to open it."""
        own: Segment | None = None
        with suppress(OSError):
            own = Segment(sizes[self.rank]) if NAMELESS and self.rank < len(sizes) and sizes[self.rank] else None
        paths = self.everyone(own.path if own else "")
        found: list[mmap.mmap] = []
        with suppress(OSError, ValueError):
            found = [mapped(path, size, writable=True) for path, size in zip(paths, sizes, strict=False)]
        opened = self.smallest(int(len(found) == len(sizes)))  # also: nobody opens them any more
        if own:
            own.close()
        return found if opened else []


class _SharedSums:
    """:class:`Sums` in shared memory.

    Args:
        group: of the ranks.
        buffers: of each rank, fp32 [size * n]; this rank changes its own alone.
    """

    def __init__(self, group: SharedGroup, buffers: list[Tensor]) -> None:
        self.values = buffers[group.rank]
        self._group = group
        count = len(self.values) // group.size
        parts = [buffer[group.rank * count :][:count] for buffer in buffers]
        self._part = parts.pop(group.rank)
        self._others = parts

    def part(self) -> Tensor:
        """See :class:`Sums`."""
        self._group.traffic["sum_part"] += self.values.nbytes - self._part.nbytes  # the others read it
        self._group.barrier()
        for other in self._others:
            self._part.add_(other)
        self._group.barrier()  # from here on everybody may change what the others have read
        return self._part


class _SharedMemory:
    """:class:`Common` memory.

    Args:
        group: of the ranks.
        memory: open on all of them.
        dtype: of its entries.
    """

    def __init__(self, group: SharedGroup, memory: mmap.mmap, dtype: torch.dtype) -> None:
        self._group, self._memory, self._dtype = group, memory, dtype

    def tensor(self, start: int, count: int) -> Tensor:
        """See :class:`Common`."""
        if not count:
            return torch.empty(0, dtype=self._dtype)
        offset = start * self._dtype.itemsize
        return torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=offset)

    def barrier(self) -> None:
        """See :class:`Common`."""
        self._group.barrier()
