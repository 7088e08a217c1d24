"""Collectives among the ranks of a group.

CPU ranks on one Linux machine exchange gradients and weights through shared memory, instead of sending them. Each rank
accumulates its gradients in its own buffer, which all ranks can read. Afterwards, each rank sums its shard over all buffers:
first its own buffer, then the other ranks' buffers in rank order. The order is fixed, so equal inputs give equal sums. Each
shard is summed by one rank, so all ranks see the same result. Ranks wait for each other on gloo's sockets, which takes no CPU
time. If a rank exits, its connections break, and the waiting ranks raise an error. The memory is anonymous (see
:mod:`areno.engine.parallel.segment`), so Linux frees the memory even if a rank is killed.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from areno.engine.parallel.rendezvous import Rendezvous, node_id, own_address
from areno.engine.parallel.segment import ANONYMOUS, Segment, map_segment

PATIENCE = timedelta(days=7)
"""A timeout that is never reached in practice, because the process that watches the ranks detects stuck ranks earlier."""


class Channel:
    """Collectives of a group of ranks. All ranks must make the same calls in the same order.

    This base class implements the collectives of a group that has only one rank.
    """

    size, rank = 1, 0

    def __init__(self) -> None:
        self.traffic: Counter[str] = Counter()
        """Estimated number of bytes that this rank has sent, by operation."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the ranks, in place."""
        return values

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the ranks' values."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. The objects may have any picklable type."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Send rank 0's ``value`` to all ranks, and return it. The ``value`` of the other ranks is ignored."""
        return value

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sum ``values`` [size * n] over the ``size`` ranks, and return this rank's shard [n] of the sums."""
        return values

    def all_gather_tensor(self, part: Tensor) -> Tensor:
        """Concatenate the shards ``part`` [n] of all ranks, in rank order. Return the result [size * n]."""
        return part

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Split ``parts`` [size * n] into one chunk [n] for each of the ``size`` ranks, and send chunk i to rank i.

        Return the received chunks [size * n], ordered by sender.
        """
        equal = [len(parts) // self.size] * self.size
        return self.all_to_all_v(parts, equal, equal)

    def all_to_all_v(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[i]`` consecutive rows to each rank i, in order. Return the received rows, ordered by sender.

        ``received[i]`` is the number of rows that come from rank i.
        """
        return rows

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite ``values`` with rank 0's values, in place."""
        return values

    def gather_to_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect all ranks' tensors in rank 0's host memory; return {} on the other ranks.

        No two ranks may use the same tensor name.
        """
        return {name: value.cpu() for name, value in values.items()}

    def send_to_first(self, values: Tensor, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Send the values of ``rank`` to rank 0. Both ranks must call this method, with the same shape and dtype."""
        return values

    def reduce_buffer(self, count: int, device: torch.device) -> SharedReduceBuffer | None:
        """Allocate a buffer that sums ``count`` numbers over the ranks. Return None if the ranks share no memory.

        ``count`` must be a multiple of the number of ranks.
        """
        return None

    def shared_memory(self, count: int, dtype: torch.dtype) -> SharedMemory | None:
        """Allocate an array of ``count`` entries that all ranks share. Return None if the ranks share no memory."""
        return None


class RankGroup(Channel):
    """A group of several ranks. Objects are sent from ``device``: the CPU for gloo, and the rank's GPU for NCCL."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.size, self.rank = process_group.size(), process_group.rank()
        self._group, self._device = process_group, device

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the ranks, in place."""
        self.traffic["all_reduce"] += 2 * values.nbytes * (self.size - 1) // self.size
        self._group.allreduce([values]).wait()
        return values

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the ranks' values."""
        least = torch.tensor([value], device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._group.allreduce([least], options).wait()
        return int(least)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""
        mine = self._encode(value)
        sizes = self.all_gather_tensor(torch.tensor([len(mine)], device=self._device)).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = mine
        texts = self.all_gather_tensor(padded).view(self.size, -1)
        return [self._decode(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """Send rank 0's ``value`` to all ranks, and return it. The ``value`` of the other ranks is ignored."""
        text = self._encode(value) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        size = torch.tensor([len(text)], device=self._device)
        self._group.broadcast([size], dist.BroadcastOptions()).wait()
        if self.rank:
            text = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        self._group.broadcast([text], dist.BroadcastOptions()).wait()
        return self._decode(text) if self.rank else value

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sum ``values`` [size * n] over the ``size`` ranks, and return this rank's shard [n] of the sums."""
        self.traffic["reduce_scatter"] += values.nbytes - values.nbytes // self.size
        part = torch.empty(len(values) // self.size, dtype=values.dtype, device=values.device)
        self._group._reduce_scatter_base(part, values, dist.ReduceScatterOptions()).wait()
        return part

    def all_gather_tensor(self, part: Tensor) -> Tensor:
        """Concatenate the shards ``part`` [n] of all ranks, in rank order. Return the result [size * n]."""
        self.traffic["all_gather_tensor"] += part.nbytes * (self.size - 1)
        gathered = torch.empty(len(part) * self.size, dtype=part.dtype, device=part.device)
        self._group._allgather_base(gathered, part).wait()  # type: ignore[attr-defined]
        return gathered

    def all_to_all_v(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[i]`` consecutive rows to each rank i, in order. Return the received rows, ordered by sender."""
        self.traffic["all_to_all_v"] += rows.nbytes - rows[: sent[self.rank]].nbytes
        output = rows.new_empty(sum(received), *rows.shape[1:])
        self._group.alltoall_base(output, rows, received, sent).wait()
        return output

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite ``values`` with rank 0's values, in place."""
        self._group.broadcast([values], dist.BroadcastOptions()).wait()
        return values

    def send_to_first(self, values: Tensor, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Send the values of ``rank`` to rank 0. Both ranks must call this method, with the same shape and dtype."""
        if self.rank:
            self.send(values.to(self._device).contiguous(), 0).wait()
            return values
        received = torch.empty(shape, dtype=dtype, device=self._device)
        self.receive(received, rank).wait()
        return received

    def gather_to_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect all ranks' tensors in rank 0's host memory, one tensor at a time. Return {} on the other ranks."""
        specs = self.all_gather([(name, tuple(value.shape), value.dtype) for name, value in values.items()])
        gathered = {} if self.rank else {name: value.cpu() for name, value in values.items()}
        for rank, entries in enumerate(specs[1:], 1):
            for name, shape, dtype in entries if self.rank in (0, rank) else ():
                value = self.send_to_first(values.get(name, torch.empty(0)), rank, shape, dtype)
                if not self.rank:
                    gathered[name] = value.cpu()
        return gathered

    def send(self, values: Tensor, rank: int) -> dist.Work:
        """Start sending values to a rank. The values must not change until the returned operation is complete."""
        self.traffic["send"] += values.nbytes
        return self._group.send([values], rank, 0)

    def receive(self, values: Tensor, rank: int) -> dist.Work:
        """Start receiving a rank's values into ``values``."""
        return self._group.recv([values], rank, 0)

    def _encode(self, value: Any) -> Tensor:
        return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8).to(self._device)

    @staticmethod
    def _decode(text: Tensor) -> Any:
        return cloudpickle.loads(text.cpu().numpy().tobytes())


class SharedGroup(RankGroup):
    """A group whose ranks share memory if the system allows shared memory."""

    def reduce_buffer(self, count: int, device: torch.device) -> SharedReduceBuffer | None:
        """See :class:`Channel`."""
        size = count * torch.float32.itemsize
        memories = self._memories([size] * self.size) if device.type == "cpu" else []
        return (
            SharedReduceBuffer(self, [torch.frombuffer(one, dtype=torch.float32) for one in memories])
            if memories
            else None
        )

    def shared_memory(self, count: int, dtype: torch.dtype) -> SharedMemory | None:
        """See :class:`Channel`."""
        memories = self._memories([count * dtype.itemsize])
        return SharedMemory(self, memories[0], dtype) if memories else None

    def barrier(self) -> None:
        """Wait until all ranks of the group call this method."""
        self.all_reduce_min(0)

    def _memories(self, sizes: list[int]) -> list[mmap.mmap]:
        """On all ranks, map one shared memory segment for each of ``sizes``. Rank i creates the segment of ``sizes[i]`` bytes.

        Return an empty list if any rank cannot map a segment.
        """
        segment: Segment | None = None
        with suppress(OSError):
            segment = Segment(sizes[self.rank]) if ANONYMOUS and self.rank < len(sizes) and sizes[self.rank] else None
        offers = self.all_gather((node_id(), segment.path if segment else ""))
        memories: list[mmap.mmap] = []
        with suppress(OSError, ValueError):
            if len({node for node, _ in offers}) == 1:
                memories = [
                    map_segment(path, size, writable=True) for (_, path), size in zip(offers, sizes, strict=False)
                ]
        opened = self.all_reduce_min(int(len(memories) == len(sizes)))  # also a barrier: all have mapped
        if segment:
            segment.close()
        return memories if opened else []


class SharedReduceBuffer:
    """Buffers for reduce-scatters in shared memory.

    Each rank has one fp32 buffer. A reduce-scatter sums the buffers of all ranks, and gives each rank an equal shard of the
    sums.

    Attributes:
        values: this rank's buffer, initially 0. The rank writes to no other buffer.
    """

    def __init__(self, group: SharedGroup, buffers: list[Tensor]) -> None:
        self.values = buffers[group.rank]
        self._group = group
        count = len(self.values) // group.size
        parts = [buffer[group.rank * count :][:count] for buffer in buffers]
        self._part = parts.pop(group.rank)
        self._others = parts

    def part(self) -> Tensor:
        """Sum the buffers of all ranks, and return this rank's shard [n] of the sums.

        The shard is a view of ``values``, and is valid only until ``values`` changes.
        """
        self._group.traffic["reduce_scatter"] += self.values.nbytes - self._part.nbytes  # the others read it
        self._group.barrier()
        for other in self._others:
            self._part.add_(other)
        self._group.barrier()  # all have read: buffers may change again
        return self._part


class SharedMemory:
    """An array of one dtype in memory that all ranks of a group share."""

    def __init__(self, group: SharedGroup, memory: mmap.mmap, dtype: torch.dtype) -> None:
        self._group, self._memory, self._dtype = group, memory, dtype

    def tensor(self, start: int, count: int) -> Tensor:
        """Return a tensor of ``count`` entries of the shared memory, from index ``start`` on."""
        if not count:
            return torch.empty(0, dtype=self._dtype)
        offset = start * self._dtype.itemsize
        return torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=offset)

    def barrier(self) -> None:
        """Wait until all ranks call this method.

        Afterwards, each rank can read what the other ranks wrote to the shared memory before they called this method.
        """
        self._group.barrier()


def meet(
    where: Rendezvous,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    patience: timedelta = PATIENCE,
    kind: type[RankGroup] = RankGroup,
) -> RankGroup:
    """Create a process group of ``size`` members, and return the group.

    Every member must call this function. On a CPU (gloo), the call returns once all members have joined. On a GPU (NCCL), the
    call may return earlier.

    Args:
        where: rendezvous of the members.
        name: name of the group, which must not be reused.
        rank: rank of this process.
        size: number of members.
        device: device of the tensors that members send.
        patience: timeout for joining and for each collective.
        kind: class of the returned group.

    Raises:
        RuntimeError or EngineError: a member did not join in time.
    """
    store = where.store(name, rank, size, patience)
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]  # only PyTorch for GPUs has it
        options = nccl.Options()
        options._timeout = patience
        return kind(nccl(store, rank, size, options), device)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = patience
    # Connections are unauthenticated: on one machine, listen on the loopback interface only.
    named = "GLOO_SOCKET_IFNAME" in os.environ
    options._devices = [gloo.create_default_device() if named else gloo.create_device(hostname=own_address())]
    return kind(gloo(store, rank, size, options), device)
