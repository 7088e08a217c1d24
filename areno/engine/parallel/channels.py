"""What the ranks of a group say to each other; on the CPUs of one machine, sums and weights in memory that all of them see.

In shared memory nothing is sent. Each rank adds its numbers up in a buffer of its own, which the others can read. When all
are done, each rank sums its part over the buffers: first its own entries, then those of the others in the order of ranks, so
equal numbers give equal sums. Each part is summed by one rank, so all ranks see the same ones. Ranks wait for each other in
gloo's sockets: waiting takes no processor time, and a rank that has ended breaks the connection, which is an error on the
others. The memory has no name (see :mod:`areno.engine.parallel.segment`), so none is left behind, whatever ends a rank.
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
from areno.engine.parallel.segment import NAMELESS, Segment, mapped

PATIENCE = timedelta(days=7)
"""Ranks wait for each other as long as it takes: whoever watches the processes knows better when one is stuck."""


class Channel:
    """Talk among the ranks of one group, here of one; every rank of it makes the same calls in the same order."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.traffic: Counter[str] = Counter()
        """Bytes that this rank has passed on, by operation, as a ring of ranks does it."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        return values

    def all_reduce_min(self, value: int) -> int:
        """Least of the ranks' numbers."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """What each rank says, in the order of ranks; any picklable object."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """What rank 0 says."""
        return value

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Add up values [size * n] over the ranks, and return this rank's n of them."""
        return values

    def all_gather_tensor(self, part: Tensor) -> Tensor:
        """Put the ranks' parts [n] together: [size * n]."""
        return part

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send part i of values [size * n] to rank i; returns what each rank has sent to this one: [size * n]."""
        equal = [len(parts) // self.size] * self.size
        return self.all_to_all_v(parts, equal, equal)

    def all_to_all_v(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows in the order of the ranks that get them, so many to each; returns the rows that have come, by sender."""
        return rows

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        return values

    def gather_to_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' tensors, which have different names, on rank 0 in the computer's memory; nothing on the others."""
        return {name: value.cpu() for name, value in values.items()}

    def send_to_first(self, values: Tensor, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On rank 0 the values of another rank, of that shape; both must call."""
        return values

    def reduce_buffer(self, count: int, device: torch.device) -> SharedReduceBuffer | None:
        """Make a place to add up ``count`` numbers in, a multiple of ``size``; None where ranks share no memory."""
        return None

    def shared_memory(self, count: int, dtype: torch.dtype) -> SharedMemory | None:
        """Make memory for ``count`` entries that all ranks have in common; None where ranks have memory of their own only."""
        return None


class Group(Channel):
    """A group of several ranks; objects travel on ``device``: the CPU for gloo, the rank's GPU for NCCL."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.size, self.rank = process_group.size(), process_group.rank()
        self._group, self._device = process_group, device

    def all_reduce(self, values: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        self.traffic["all_reduce"] += values.nbytes
        self._group.allreduce([values]).wait()
        return values

    def all_reduce_min(self, value: int) -> int:
        """Least of the ranks' numbers."""
        least = torch.tensor([value], device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._group.allreduce([least], options).wait()
        return int(least)

    def all_gather(self, value: Any) -> list[Any]:
        """What each rank says: sizes first, then all texts padded to the longest."""
        mine = self._encode(value)
        sizes = self.all_gather_tensor(torch.tensor([len(mine)], device=self._device)).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = mine
        texts = self.all_gather_tensor(padded).view(self.size, -1)
        return [self._decode(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """What rank 0 says."""
        text = self._encode(value) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        size = torch.tensor([len(text)], device=self._device)
        self._group.broadcast([size], dist.BroadcastOptions()).wait()
        if self.rank:
            text = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        self._group.broadcast([text], dist.BroadcastOptions()).wait()
        return self._decode(text) if self.rank else value

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Add up values [size * n] over the ranks, and return this rank's n of them."""
        self.traffic["reduce_scatter"] += values.nbytes - values.nbytes // self.size
        part = torch.empty(len(values) // self.size, dtype=values.dtype, device=values.device)
        self._group._reduce_scatter_base(part, values, dist.ReduceScatterOptions()).wait()
        return part

    def all_gather_tensor(self, part: Tensor) -> Tensor:
        """Put the ranks' parts [n] together: [size * n]."""
        self.traffic["all_gather_tensor"] += part.nbytes * (self.size - 1)
        whole = torch.empty(len(part) * self.size, dtype=part.dtype, device=part.device)
        self._group._allgather_base(whole, part).wait()  # type: ignore[attr-defined]
        return whole

    def all_to_all_v(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows in the order of the ranks that get them, so many to each; returns the rows that have come, by sender."""
        self.traffic["all_to_all_v"] += rows.nbytes - rows[: sent[self.rank]].nbytes
        found = rows.new_empty(sum(received), *rows.shape[1:])
        self._group.alltoall_base(found, rows, received, sent).wait()
        return found

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        self._group.broadcast([values], dist.BroadcastOptions()).wait()
        return values

    def send_to_first(self, values: Tensor, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On rank 0 the values of another rank, of that shape; both must call."""
        if self.rank:
            self.send(values.to(self._device).contiguous(), 0).wait()
            return values
        found = torch.empty(shape, dtype=dtype, device=self._device)
        self.receive(found, rank).wait()
        return found

    def gather_to_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' tensors, one at a time, on rank 0 in the computer's memory; nothing on the others."""
        known = self.all_gather([(name, tuple(value.shape), value.dtype) for name, value in values.items()])
        found = {} if self.rank else {name: value.cpu() for name, value in values.items()}
        for rank, entries in enumerate(known[1:], 1):
            for name, shape, dtype in entries if self.rank in (0, rank) else ():
                value = self.send_to_first(values.get(name, torch.empty(0)), rank, shape, dtype)
                if not self.rank:
                    found[name] = value.cpu()
        return found

    def send(self, values: Tensor, rank: int) -> dist.Work:
        """Begin to send values to a rank, which must not change until it is done."""
        self.traffic["send"] += values.nbytes
        return self._group.send([values], rank, 0)

    def receive(self, values: Tensor, rank: int) -> dist.Work:
        """Begin to receive a rank's values, in place."""
        return self._group.recv([values], rank, 0)

    def _encode(self, value: Any) -> Tensor:
        return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8).to(self._device)

    @staticmethod
    def _decode(text: Tensor) -> Any:
        return cloudpickle.loads(text.cpu().numpy().tobytes())


class SharedGroup(Group):
    """A group whose ranks may share memory; where the system does not let them, it is like any other group."""

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
        """Wait for all ranks."""
        self.all_reduce_min(0)

    def _memories(self, sizes: list[int]) -> list[mmap.mmap]:
        """Memory of so many bytes of each of the first ranks, open on all; nothing if one rank cannot open it."""
        own: Segment | None = None
        with suppress(OSError):
            own = Segment(sizes[self.rank]) if NAMELESS and self.rank < len(sizes) and sizes[self.rank] else None
        said = self.all_gather((node_id(), own.path if own else ""))
        found: list[mmap.mmap] = []
        with suppress(OSError, ValueError):
            if len({node for node, _ in said}) == 1:
                found = [mapped(path, size, writable=True) for (_, path), size in zip(said, sizes, strict=False)]
        opened = self.all_reduce_min(int(len(found) == len(sizes)))  # also: nobody opens them any more
        if own:
            own.close()
        return found if opened else []


class SharedReduceBuffer:
    """Numbers that are added up over the ranks again and again, in one buffer fp32 [size * n] per rank.

    Attributes:
        values: this rank's buffer, the only one that it changes; 0 at first.
    """

    def __init__(self, group: SharedGroup, buffers: list[Tensor]) -> None:
        self.values = buffers[group.rank]
        self._group = group
        count = len(self.values) // group.size
        parts = [buffer[group.rank * count :][:count] for buffer in buffers]
        self._part = parts.pop(group.rank)
        self._others = parts

    def part(self) -> Tensor:
        """This rank's n of the sums. They hold until ``values`` change, and lie in them where that saves memory."""
        self._group.traffic["reduce_scatter"] += self.values.nbytes - self._part.nbytes  # the others read it
        self._group.barrier()
        for other in self._others:
            self._part.add_(other)
        self._group.barrier()  # from here on everybody may change what the others have read
        return self._part


class SharedMemory:
    """Memory that all ranks of a group have in common, as entries of one type."""

    def __init__(self, group: SharedGroup, memory: mmap.mmap, dtype: torch.dtype) -> None:
        self._group, self._memory, self._dtype = group, memory, dtype

    def tensor(self, start: int, count: int) -> Tensor:
        """Some of its entries, as a tensor with a storage of its own."""
        if not count:
            return torch.empty(0, dtype=self._dtype)
        offset = start * self._dtype.itemsize
        return torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=offset)

    def barrier(self) -> None:
        """Wait for all ranks; what they have written is there then."""
        self._group.barrier()


def meet(
    where: Rendezvous,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    patience: timedelta = PATIENCE,
    kind: type[Group] = Group,
) -> Group:
    """Join processes in a group of its own; returns when all have come.

    Args:
        where: they meet.
        name: of the group, which is used once.
        rank: this process, of ``size``.
        device: where what they send each other is.
        patience: how long each waits for the others, now and later.
        kind: of group.

    Raises:
        RuntimeError: a member has not come.
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
    # Connections are not authenticated, so on one machine nobody else may make them.
    named = "GLOO_SOCKET_IFNAME" in os.environ
    options._devices = [gloo.create_default_device() if named else gloo.create_device(hostname=own_address())]
    return kind(gloo(store, rank, size, options), device)
