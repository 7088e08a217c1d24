"""How the ranks of an engine divide a model and its work.

Ranks form a grid with the axes pipeline, data, context, tensor; the last one counts fastest, so ranks that talk most are
neighbours. A replica is a copy of the model: the ranks of one place on the data axis. A stage is the part of all replicas
that has the same layers: the ranks of one place on the pipeline axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from areno.errors import UsageError

NO_ROLLOUT = (
    "the stages of a pipeline generate nothing; use a layout without p, or rollouts with an engine of their own"
)


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

    The layers are cut into ``pp_size`` x ``pp_chunks`` runs of neighbours, which the stages take in turn: with two chunks the
    first of two stages has the first and the third run. ``pp_less`` is what the first and the last run have to do beside
    layers (embedding, output layer), counted in layers. ``reshards`` says whether layers that FSDP has put together are freed
    between forward and backward; ``units`` are the classes of modules that it shards one by one, if not decoder layers; with
    ``offloads`` shards wait in the computer's memory. With
    ``reads_once`` one rank reads the weights of a stage and sends them to the others.
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
        """Number of ranks that have the same layers."""
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

    def runs_of_layers(self, count: int) -> list[range]:
        """Layers of each run, for a model of so many; run i belongs to stage i % ``pp_size``.

        Each has at least one. Every further layer goes to the run that has the least to do. ValueError: there are too few.
        """
        runs = self.pp_size * self.pp_chunks
        if count < runs:
            raise ValueError(f"{count} layers cannot be divided into {runs} runs")
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
        """First rank of each replica, in the first stage."""
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
