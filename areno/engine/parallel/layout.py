"""How the ranks of an engine divide a model and its work.

Ranks form a grid with the axes pipeline, data, context, tensor; the last one counts fastest, so ranks that talk most are
neighbours. A replica is a copy of the model: the ranks of one place on the data axis. A stage is the part of all replicas
that has the same layers: the ranks of one place on the pipeline axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from areno.errors import UsageError


class Place(NamedTuple):
    """A rank's place on each axis."""

    stage: int
    replica: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes.

    ``fsdp`` shards weights and gradients across ``dp_size`` x ``cp_size`` ranks; without it each replica has them whole, and
    only the optimizer's states are sharded. Layouts with context or expert parallelism always shard. The experts of a mixture
    are divided among ``ep_size`` of those ranks, and sharded across the rest.
    """

    dp_size: int = 1
    tp_size: int = 1
    fsdp: bool = False
    cp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        if self.cp_size > 1 or self.ep_size > 1:
            object.__setattr__(self, "fsdp", True)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP shards each tensor across."""
        return self.dp_size * self.cp_size

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        rest, tensor = divmod(rank, self.tp_size)
        rest, context = divmod(rest, self.cp_size)
        stage, replica = divmod(rest, self.dp_size)
        return Place(stage, replica, context, tensor)

    def leaders(self) -> list[int]:
        """First rank of each replica."""
        return [replica * self.cp_size * self.tp_size for replica in range(self.dp_size)]

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
        if fsdp and world_size == tp_size:
            raise UsageError(
                f"fsdp with world_size={world_size}, tp_size={tp_size}: there is one replica, so no other to shard weights "
                f"with; use world_size={2 * tp_size} or more, or leave fsdp out"
            )
        return cls(world_size // tp_size, tp_size, fsdp)
