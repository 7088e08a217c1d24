"""Who else works on the same model: the layout of ranks, and what they say to each other.

Ranks form a grid of ``dp_size`` replicas with ``tp_size`` ranks each; rank = replica * tp_size + place in the replica. The
default process group of a rank is its replica, so that whatever shards a model over "the world" shards it over the
replica; with FSDP, where a replica is one rank, it is all replicas. The groups across replicas are process groups of their
own.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from areno.errors import UsageError

# Ranks wait for each other as long as it takes: whoever watches the processes knows better when one is stuck.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many replicas of the model there are, and over how many ranks each is spread.

    ``fsdp`` spreads weights and gradients over the replicas as well, which otherwise share the optimizer's state alone.
    """

    dp_size: int = 1
    tp_size: int = 1
    fsdp: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.tp_size

    def leaders(self) -> list[int]:
        """First rank of each replica."""
        return [replica * self.tp_size for replica in range(self.dp_size)]

    @classmethod
    def of(cls, world_size: int, tp_size: int, dp_size: int | None, fsdp: bool = False) -> Layout:
        """Make a layout.

        Raises:
            UsageError: the three sizes do not fit each other.
        """
        for name, value in (("world_size", world_size), ("tp_size", tp_size), ("dp_size", dp_size)):
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: use at least 1")
        if world_size % tp_size:
            raise UsageError(
                f"world_size={world_size} is not divisible by tp_size={tp_size}; use a tp_size that divides it"
            )
        if dp_size is not None and dp_size * tp_size != world_size:
            raise UsageError(
                f"dp_size={dp_size} times tp_size={tp_size} is not world_size={world_size}; leave dp_size out, or use "
                f"dp_size={world_size // tp_size}"
            )
        if fsdp and tp_size > 1:
            raise UsageError(
                f"fsdp with tp_size={tp_size}: weights are spread over replicas or over the ranks of one, not both yet; "
                "leave fsdp out, or use tp_size=1"
            )
        if fsdp and world_size == 1:
            raise UsageError(
                "fsdp with world_size=1: there is one replica, and nobody to share its weights with; use world_size=2 or "
                "more, or leave fsdp out"
            )
        return cls(world_size // tp_size, tp_size, fsdp)


class Channel(Protocol):
    """Talk among the ranks of one group; every rank of it makes the same calls in the same order."""

    size: int
    rank: int

    def sum(self, values: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        ...

    def smallest(self, value: int) -> int:
        """Least of the ranks' numbers."""
        ...

    def everyone(self, value: Any) -> list[Any]:
        """What each rank says, in the order of ranks; any picklable object."""
        ...

    def from_first(self, value: Any) -> Any:
        """What rank 0 says."""
        ...

    def sum_part(self, values: Tensor) -> Tensor:
        """Add up values [size * n] over the ranks, and return this rank's n of them."""
        ...

    def join(self, part: Tensor) -> Tensor:
        """Put the ranks' parts [n] together: [size * n]."""
        ...

    def sums(self, count: int, device: torch.device) -> Sums | None:
        """Make a place for ``count`` numbers to add up in, a multiple of ``size``; None where ranks share no memory."""
        ...

    def common(self, count: int, dtype: torch.dtype) -> Common | None:
        """Make memory for ``count`` entries that all ranks have in common; None where ranks have memory of their own only."""
        ...


class Sums(Protocol):
    """Numbers that are added up over the ranks again and again, always in the same place.

    Attributes:
        values: this rank's, fp32 [size * n]; 0 at first.
    """

    values: Tensor

    def part(self) -> Tensor:
        """This rank's n of the sums. They hold until ``values`` change, and lie in them where that saves memory."""
        ...


class Common(Protocol):
    """Memory that all ranks of a group have in common."""

    def tensor(self, start: int, count: int) -> Tensor:
        """Some of its entries, as a tensor with a storage of its own."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks; what they have written is there then."""
        ...


class Alone:
    """A group of one."""

    size, rank = 1, 0

    def sum(self, values: Tensor) -> Tensor:
        """The same values."""
        return values

    def smallest(self, value: int) -> int:
        """The same number."""
        return value

    def everyone(self, value: Any) -> list[Any]:
        """A list of one."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """The same object."""
        return value

    def sum_part(self, values: Tensor) -> Tensor:
        """The same values."""
        return values

    def join(self, part: Tensor) -> Tensor:
        """The same part."""
        return part

    def sums(self, count: int, device: torch.device) -> Sums | None:
        """None: there is nobody to share it with."""
        return None

    def common(self, count: int, dtype: torch.dtype) -> Common | None:
        """None: there is nobody to share it with."""
        return None


class Group:
    """A group of several ranks.

    Args:
        process_group: connects them.
        device: where objects travel from and to; CPU for gloo, the rank's GPU for NCCL.

    Attributes:
        traffic: bytes that this rank has passed on, by operation, as a ring of ranks does it.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.size, self.rank = process_group.size(), process_group.rank()
        self._group, self._device = process_group, device
        self.traffic: Counter[str] = Counter()

    def sum(self, values: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        self.traffic["sum"] += values.nbytes
        self._group.allreduce([values]).wait()
        return values

    def smallest(self, value: int) -> int:
        """Least of the ranks' numbers."""
        found = torch.tensor([value], device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._group.allreduce([found], options).wait()
        return int(found)

    def everyone(self, value: Any) -> list[Any]:
        """What each rank says: sizes first, then all texts padded to the longest."""
        mine = self._encode(value)
        sizes = self.join(torch.tensor([len(mine)], device=self._device)).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = mine
        texts = self.join(padded).view(self.size, -1)
        return [self._decode(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def from_first(self, value: Any) -> Any:
        """What rank 0 says."""
        text = self._encode(value) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        size = torch.tensor([len(text)], device=self._device)
        self._group.broadcast([size], dist.BroadcastOptions()).wait()
        if self.rank:
            text = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        self._group.broadcast([text], dist.BroadcastOptions()).wait()
        return self._decode(text) if self.rank else value

    def sum_part(self, values: Tensor) -> Tensor:
        """Add up values [size * n] over the ranks, and return this rank's n of them."""
        self.traffic["sum_part"] += values.nbytes - values.nbytes // self.size
        part = torch.empty(len(values) // self.size, dtype=values.dtype, device=values.device)
        self._group._reduce_scatter_base(part, values, dist.ReduceScatterOptions()).wait()
        return part

    def join(self, part: Tensor) -> Tensor:
        """Put the ranks' parts [n] together: [size * n]."""
        self.traffic["join"] += part.nbytes * (self.size - 1)
        whole = torch.empty(len(part) * self.size, dtype=part.dtype, device=part.device)
        self._group._allgather_base(whole, part).wait()  # type: ignore[attr-defined]
        return whole

    def sums(self, count: int, device: torch.device) -> Sums | None:
        """None: what the ranks have is sent."""
        return None

    def common(self, count: int, dtype: torch.dtype) -> Common | None:
        """None: what the ranks have is sent."""
        return None

    def spread(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        self._group.broadcast([values], dist.BroadcastOptions()).wait()
        return values

    def _encode(self, value: Any) -> Tensor:
        return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8).to(self._device)

    @staticmethod
    def _decode(text: Tensor) -> Any:
        return cloudpickle.loads(text.cpu().numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's place, and its channels.

    Attributes:
        layout: of all ranks.
        replica: which replica this rank belongs to.
        place: which part of that replica it holds.
        data: ranks that hold the same part of other replicas.
        tensor: ranks that hold the other parts of this replica.
        turns: the same ranks, on a line of their own for the rollout loop.
    """

    layout: Layout = field(default_factory=Layout)
    replica: int = 0
    place: int = 0
    data: Channel = field(default_factory=Alone)
    tensor: Channel = field(default_factory=Alone)
    turns: Channel = field(default_factory=Alone)

    @property
    def alone(self) -> bool:
        """Whether there is only this rank."""
        return self.layout.world_size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its replica."""
        return self.place == 0

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.leads and self.replica == 0

    def smallest(self, value: int) -> int:
        """Least number over all ranks."""
        return self.data.smallest(self.tensor.smallest(value))


def connect(layout: Layout, rank: int, folder: Path, device: torch.device) -> Peers:
    """Join the other ranks of a machine; returns when all have come.

    Args:
        layout: of all ranks.
        rank: this one.
        folder: private folder where ranks leave their addresses; no port is agreed on beforehand.
        device: where this rank's model lives.
    """
    from areno.engine.parallel.shared_buffer import SharedGroup

    replica, place = divmod(rank, layout.tp_size)
    across = SharedGroup if device.type == "cpu" else Group

    def group(name: str, own: int, size: int, device: torch.device = device, kind: type[Group] = Group) -> Channel:
        if size == 1:
            return Alone()
        return meet(folder / name, own, size, device, kind=kind)

    if layout.tp_size > 1:
        _join_default_group(folder / f"replica-{replica}", place, layout.tp_size, device)
    elif layout.fsdp:
        _join_default_group(folder / "replicas", replica, layout.dp_size, device)
    return Peers(
        layout,
        replica,
        place,
        data=group(f"data-{place}", replica, layout.dp_size, kind=across),
        tensor=group(f"tensor-{replica}", place, layout.tp_size),
        # In a thread of its own, and of words only: never on the device, whose collectives must keep one order.
        turns=group(f"turns-{replica}", place, layout.tp_size, torch.device("cpu")),
    )


def _join_default_group(file: Path, rank: int, size: int, device: torch.device) -> None:
    store = dist.FileStore(str(file), size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE, device_id=_bound(device)
    )


def meet(
    file: Path,
    rank: int,
    size: int,
    device: torch.device,
    patience: timedelta = _PATIENCE,
    kind: type[Group] = Group,
) -> Group:
    """Join processes of this machine in a group of its own; returns when all have come.

    Args:
        file: private to the group; it must not be there before.
        rank: this process.
        size: how many there are.
        device: where what they say to each other is.
        patience: how long each waits for the others, now and later.
        kind: of group.

    Raises:
        RuntimeError: somebody has not come.
    """
    return kind(_process_group(dist.FileStore(str(file), size), rank, size, device, patience), device)


def _bound(device: torch.device) -> torch.device | None:
    return device if device.type == "cuda" else None


def _process_group(
    store: dist.Store, rank: int, size: int, device: torch.device, patience: timedelta
) -> dist.ProcessGroup:
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]  # only PyTorch for GPUs has it
        options = nccl.Options()
        options._timeout = patience
        return nccl(store, rank, size, options)  # type: ignore[no-any-return]
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = patience
    # Connections are not authenticated, so nobody but this machine may make them.
    named = "GLOO_SOCKET_IFNAME" in os.environ
    options._devices = [gloo.create_default_device() if named else gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)  # type: ignore[no-any-return]
