"""A rank's place in the layout, and its communication groups.

Without FSDP, a rank's default process group is its tensor-parallel group. Library code that shards a model across the default
group therefore uses the tensor-parallel ranks. With FSDP, the default group contains all ranks of the stage, and a device mesh
defines the stage's axes. Each other group of :class:`RankContext` is a process group of its own, even if it consists of the
same ranks as the default group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areno.engine.parallel.channels import PATIENCE, Channel, RankGroup, SharedGroup, meet
from areno.engine.parallel.layout import Layout, Place
from areno.engine.parallel.rendezvous import Rendezvous

Links = dict[tuple[bool, int], RankGroup]
"""Groups of two ranks in neighboring pipeline stages: the first rank sends activations or gradients to the second rank.

Activations go to the next stage, and gradients go to the previous stage. Each direction has a separate group, so that the two
directions cannot block each other. The key of a group is the pair (whether the group carries gradients, index of the sending
stage).
"""


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's place in the layout, and its communication groups."""

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    data: Channel = field(default_factory=Channel)  # ranks with the same place in all replicas
    context: Channel = field(default_factory=Channel)  # the ranks that divide the tokens of this replica's rows
    tensor: Channel = field(default_factory=Channel)  # the ranks that divide each layer
    turns: Channel = field(default_factory=Channel)  # the ranks of ``tensor``, in a separate group for the rollout loop
    experts: Channel = field(default_factory=Channel)  # the ranks that divide the experts of each MoE layer
    stage: Channel = field(default_factory=Channel)  # all ranks with the same layers; only with FSDP
    pipeline: Channel = field(default_factory=Channel)  # ranks with the same place in all stages
    ends: Channel = field(default_factory=Channel)  # ranks with the same place in the first and the last stage
    links: Links = field(default_factory=dict, hash=False)  # point-to-point groups between neighboring stages

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.layout.place(self.rank).replica

    @property
    def place(self) -> Place:
        """This rank's index on each axis of the layout."""
        return self.layout.place(self.rank)

    @property
    def alone(self) -> bool:
        """Whether the layout has only this rank."""
        return self.layout.world_size == 1

    @property
    def decides(self) -> bool:
        """Whether this is the first rank of its tensor-parallel group.

        In rollouts, this rank decides when requests start and end, and the other ranks of the group follow its decisions.
        """
        return self.tensor.rank == 0

    @property
    def predicts(self) -> bool:
        """Whether this rank has the last layers."""
        return self.place.stage == self.layout.pp_size - 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of the ranks that have the same stage and the same replica."""
        return self.tensor.rank == 0 and self.context.rank == 0

    @property
    def heads(self) -> bool:
        """Whether this is the first rank of its pipeline stage."""
        return self.rank % self.layout.stage_size == 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def reader(self) -> int:
        """Index of this rank's part of a scoring batch, whose rows are divided among the ranks of the data and context axes."""
        return self.replica * self.layout.cp_size + self.context.rank

    @property
    def reads(self) -> bool:
        """Whether this rank reads weights from disk.

        With FSDP and ``layout.reads_once``, only the first rank of each pipeline stage reads weights.
        """
        return not (self.layout.fsdp and self.layout.reads_once) or self.heads

    def broadcast_from_reader(self, values: Tensor) -> None:
        """Broadcast values within a stage, in place, from the rank that reads the weights."""
        if self.place.replica == 0:
            self.context.broadcast(values)
        self.data.broadcast(values)

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the values of all ranks."""
        for channel in (self.tensor, self.context, self.data, self.pipeline):
            value = channel.all_reduce_min(value)
        return value


def connect(layout: Layout, rank: int, where: Rendezvous, device: torch.device) -> RankContext:
    """Create this rank's communication groups; see :func:`meet`. All ranks must call this function."""
    place = layout.place(rank)
    across = SharedGroup if device.type == "cpu" else RankGroup

    def group(
        name: str, own: int, size: int, device: torch.device = device, kind: type[RankGroup] = RankGroup
    ) -> Channel:
        if size == 1:
            return Channel()
        return meet(where, name, own, size, device, kind=kind)

    stage = Channel()
    if layout.fsdp:
        size = layout.shards * layout.tp_size
        stage = _join_default_group(where, f"stage-{place.stage}", rank % size, size, device)
    elif layout.tp_size > 1:
        _join_default_group(where, f"replica-{place.stage}-{place.replica}", place.tensor, layout.tp_size, device)
    shard, expert = divmod(place.replica * layout.cp_size + place.context, layout.ep_size)
    column = f"{place.replica}-{place.context}-{place.tensor}"
    at_an_end = place.stage in (0, layout.pp_size - 1)
    line = f"{place.stage}-{place.replica}-{place.context}"
    return RankContext(
        layout,
        rank,
        data=group(f"data-{place.stage}-{place.context}-{place.tensor}", place.replica, layout.dp_size, kind=across),
        context=group(f"context-{place.stage}-{place.replica}-{place.tensor}", place.context, layout.cp_size),
        tensor=group(f"tensor-{line}", place.tensor, layout.tp_size),
        # The rollout thread uses this group, so its tensors stay on the CPU: collectives on a device must keep one order.
        turns=group(f"turns-{line}", place.tensor, layout.tp_size, torch.device("cpu")),
        experts=group(f"experts-{place.stage}-{shard}-{place.tensor}", expert, layout.ep_size),
        stage=stage,
        pipeline=group(f"pipeline-{column}", place.stage, layout.pp_size),
        ends=group(f"ends-{column}", int(place.stage > 0), 2 if layout.pp_size > 1 else 1) if at_an_end else Channel(),
        links=_links(layout, place.stage, f"link-{column}", where, device),
    )


def _links(layout: Layout, stage: int, name: str, where: Rendezvous, device: torch.device) -> Links:
    """Create the groups that connect a stage with its neighbors.

    To prevent deadlocks, all stages create these groups in the same order.
    """
    links: Links = {}
    stages = layout.pp_size
    for gradients in (False, True) if stages > 1 else ():
        for sender in range(stages):
            receiver = (sender + (-1 if gradients else 1)) % stages
            around = sender == (0 if gradients else stages - 1)  # last stage to next chunk of the first
            if stage in (sender, receiver) and (layout.pp_chunks > 1 or not around):
                own = f"{name}-{'gradients' if gradients else 'activations'}-{sender}"
                links[gradients, sender] = meet(where, own, int(stage == receiver), 2, device)
    return links


def _join_default_group(where: Rendezvous, name: str, rank: int, size: int, device: torch.device) -> RankGroup:
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
    joined: Any = dist.group.WORLD
    return RankGroup(joined._get_backend(device), device)
