"""How the ranks of an engine divide a model and its work.

Ranks form a grid with the axes pipeline, data, context and tensor. The tensor axis varies fastest, so that the ranks that
communicate most are adjacent. The ranks with the same index on the data axis form a replica. In training, all ranks of a
replica work on the same rows. Without FSDP, each replica holds a copy of the model. With FSDP, all replicas share one sharded
copy. The ranks with the same index on the pipeline axis form a stage. All ranks of a stage compute the same layers. With tensor
parallelism or FSDP, each of these ranks holds only shards of the layers' weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from areno.errors import UsageError

NO_ROLLOUT = (
    "an engine with pipeline parallelism cannot generate sequences; remove pipeline parallelism (such as p2 in d2p2) from the "
    "layout, or use a separate rollout engine"
)


class Place(NamedTuple):
    """The coordinates of a rank in the grid of ranks: its index on each axis."""

    stage: int
    replica: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes of the grid of ranks.

    With ``fsdp``, ``dp_size`` x ``cp_size`` ranks shard weights and gradients. Without ``fsdp``, only the optimizer state is
    sharded. Layouts with context or expert parallelism always use FSDP. In an MoE layer, each group of ``ep_size`` ranks
    divides the experts. Each expert is thus assigned to one rank in each group. The weights of an expert are sharded across
    all ranks to which the expert is assigned.

    The layers are divided into ``pp_size`` x ``pp_chunks`` model chunks. The chunks are assigned to the stages round-robin: of
    two stages with two chunks each, the first stage has the first and the third chunk. The first chunk also
    has the embedding, and the last chunk also has the output layer, so these two chunks get fewer layers: the embedding counts
    as ``pp_less[0]`` layers, and the output layer counts as ``pp_less[1]`` layers.

    With ``reshards``, FSDP frees gathered layers between the forward and the backward pass. ``units`` lists the module classes
    that FSDP shards as units. If ``units`` is empty, the units are decoder layers. With ``offloads``, FSDP keeps shards in host
    memory. With ``reads_once`` and FSDP, one rank per stage reads the weights and broadcasts the weights to the other ranks.
    """

    dp_size: int = 1
    tp_size: int = 1
    fsdp: bool = False
    cp_size: int = 1
    ep_size: int = 1
    pp_size: int = 1
    pp_chunks: int = 1
    pp_less: tuple[int, int] = (0, 0)
    reshards: bool = True
    units: tuple[str, ...] = ()
    offloads: bool = False
    reads_once: bool = False

    def __post_init__(self) -> None:
        if self.cp_size > 1 or self.ep_size > 1:
            object.__setattr__(self, "fsdp", True)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks in each pipeline stage."""
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def shards(self) -> int:
        """Number of ranks across which FSDP shards each tensor."""
        return self.dp_size * self.cp_size

    def place(self, rank: int) -> Place:
        """Return the index of a rank on each axis of the grid of ranks."""
        rest, tensor = divmod(rank, self.tp_size)
        rest, context = divmod(rest, self.cp_size)
        stage, replica = divmod(rest, self.dp_size)
        return Place(stage, replica, context, tensor)

    def runs_of_layers(self, count: int) -> list[range]:
        """Divide ``count`` layers into model chunks; chunk i belongs to stage i % ``pp_size``.

        The work of the chunks is balanced. The embedding, in the first chunk, counts as ``pp_less[0]`` layers. The output
        layer, in the last chunk, counts as ``pp_less[1]`` layers. Raises ValueError if there are fewer layers than chunks.
        """
        runs = self.pp_size * self.pp_chunks
        if count < runs:
            raise ValueError(f"{count} layers cannot be divided into {runs} model chunks")
        layers, work = [1] * runs, [1] * runs
        work[0] += self.pp_less[0]
        work[-1] += self.pp_less[1]
        for _ in range(count - runs):
            least = work.index(min(work))
            layers[least] += 1
            work[least] += 1
        ends = list(accumulate(layers))
        return [range(end - size, end) for end, size in zip(ends, layers, strict=True)]

    def leaders(self) -> list[int]:
        """Return one rank per replica: the first rank among the replica's ranks in the first stage."""
        return [replica * self.cp_size * self.tp_size for replica in range(self.dp_size)]

    @classmethod
    def of(cls, world_size: int, tp_size: int, dp_size: int | None, fsdp: bool = False) -> Layout:
        """Create a layout. Raises UsageError if the sizes are inconsistent."""
        for name, value in (("world_size", world_size), ("tp_size", tp_size), ("dp_size", dp_size)):
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: use at least 1")
        if world_size % tp_size:
            raise UsageError(
                f"world_size={world_size} is not divisible by tp_size={tp_size}; use a tp_size that divides world_size"
            )
        if dp_size is not None and dp_size * tp_size != world_size:
            raise UsageError(
                f"dp_size={dp_size} times tp_size={tp_size} is not world_size={world_size}; remove dp_size, or use "
                f"dp_size={world_size // tp_size}"
            )
        if fsdp and world_size == tp_size:
            raise UsageError(
                f"fsdp with world_size={world_size}, tp_size={tp_size}: FSDP needs at least two replicas to shard across; "
                f"use world_size={2 * tp_size} or more, or remove fsdp"
            )
        return cls(world_size // tp_size, tp_size, fsdp)
