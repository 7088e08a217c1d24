"""Who else works on the same model: the layout of ranks, and the channels between them.

Ranks form a grid of ``dp_size`` replicas with ``tp_size`` ranks each; rank = replica * tp_size + place in the replica. The
default process group of a rank is its replica, so that whatever shards a model over "the world" shards it over the
replica; with FSDP, where a replica is one rank, it is all replicas. The groups across replicas are process groups of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from areno.engine.parallel.channels import PATIENCE, Channel, Group, SharedGroup, meet
from areno.engine.parallel.rendezvous import Rendezvous
from areno.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas of the model, and ranks of each; ``fsdp`` also shards weights and gradients across the replicas."""

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
        """Make a layout; a UsageError says which sizes do not fit each other."""
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


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's replica, its place in it, and its channels."""

    layout: Layout = field(default_factory=Layout)
    replica: int = 0
    place: int = 0
    data: Channel = field(default_factory=Channel)  # ranks that hold the same part of other replicas
    tensor: Channel = field(default_factory=Channel)  # ranks that hold the other parts of this replica
    turns: Channel = field(default_factory=Channel)  # the same ranks, on a line of their own for the rollout loop

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


def connect(layout: Layout, rank: int, where: Rendezvous, device: torch.device) -> Peers:
    """Join the other ranks; returns when all have come."""
    replica, place = divmod(rank, layout.tp_size)
    across = SharedGroup if device.type == "cpu" else Group

    def group(name: str, own: int, size: int, device: torch.device = device, kind: type[Group] = Group) -> Channel:
        if size == 1:
            return Channel()
        return meet(where, name, own, size, device, kind=kind)

    if layout.tp_size > 1:
        _join_default_group(where, f"replica-{replica}", place, layout.tp_size, device)
    elif layout.fsdp:
        _join_default_group(where, "replicas", replica, layout.dp_size, device)
    return Peers(
        layout,
        replica,
        place,
        data=group(f"data-{place}", replica, layout.dp_size, kind=across),
        tensor=group(f"tensor-{replica}", place, layout.tp_size),
        # In a thread of its own, and of words only: never on the device, whose collectives must keep one order.
        turns=group(f"turns-{replica}", place, layout.tp_size, torch.device("cpu")),
    )


def _join_default_group(where: Rendezvous, name: str, rank: int, size: int, device: torch.device) -> None:
    store = where.store(name, rank, size, PATIENCE)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
