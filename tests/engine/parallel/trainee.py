"""Ranks that train the same model in one layout after another, without restarting."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areno.engine import role as role_module
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.parts import local, unsharded
from areno.engine.parallel.rank_context import RankContext, connect
from areno.engine.parallel.rendezvous import FolderRendezvous
from areno.engine.parallel.workers import WorkerGroup
from areno.engine.role import Role, load_role
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.sharded import ZeroAdamW
from areno.loss_fns import grpo_loss_fn, sft_loss_fn, value_loss_fn
from areno.types import TrainSequence
from tests.engine.test_equivalences import rows

CPU = torch.device("cpu")
STEPS = 5
# A small epsilon would turn gradients that are only rounding error into steps as large as the learning rate.
OPTIMIZER = OptimizerOptions(lr=1e-3, eps=1e-3, grad_clip_norm=0.5, weight_decay=0.01)
LOSSES = {
    "sft": ("policy", sft_loss_fn),
    "grpo": ("policy", partial(grpo_loss_fn, kl_coef=0.1)),
    "value": ("value", value_loss_fn),
}


@dataclass(frozen=True)
class Lesson:
    """What is trained, and how: ``mini_bs`` rows per pass; ``tree`` computes common prefixes once."""

    path: str
    loss: str = "grpo"
    mini_bs: int = 2
    recompute: bool = True
    tree: bool = False
    lora: bool | tuple[str, ...] = False  # which layers have an adapter, if not all
    dtype: torch.dtype = torch.float32
    settings: OptimizerOptions = field(default_factory=lambda: OPTIMIZER, hash=False)


@dataclass(frozen=True)
class Learned:
    """Results: statistics of each step, and unsharded tensors by name."""

    stats: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]
    held: int  # entries of the weights that this rank keeps between passes


def batch(step: int, tree: bool) -> list[TrainSequence]:
    """Return the rows of a step: 7, 8, 3, ... of different lengths; with ``tree``, pairs of them share a prefix."""
    found = rows((7, 8, 3, 8, 2)[step % 5], seed=10 + step)
    if tree:
        for first, second in zip(found[::2], found[1::2], strict=False):
            same = min(len(first.tokens), len(second.tokens)) - 1
            second.tokens[:same] = first.tokens[:same]
    return found


def learn(lesson: Lesson, peers: RankContext) -> Learned:
    """Train; every rank must call this."""
    kind, loss = LOSSES[lesson.loss]
    options = LoadOptions(dtype=lesson.dtype, peers=peers)
    layers = {} if lesson.lora is True else {"target_modules": lesson.lora}
    adapter = AdapterOptions(rank=4, **layers) if lesson.lora else None
    if lesson.settings.offload:  # refused on a CPU, where it works the same but gains nothing
        role_module._check_choices = lambda *_: None
    role = load_role("actor", lesson.path, kind, options, lesson.settings, lesson.recompute, adapter)
    role.tree = lesson.tree
    gradients = first_gradients(role, lesson, loss)
    stats = [role.training.run(batch(step, lesson.tree), loss, lesson.mini_bs) for step in range(STEPS)]
    parameters = role.model.parameters()
    weights = {name: unsharded(local(p.detach()), p).clone() for name, p in parameters}
    held = sum(local(p).numel() for _, p in parameters)
    return Learned(stats, all_stages(gradients, peers), all_stages(weights, peers), held)


def all_stages(tensors: dict[str, torch.Tensor], peers: RankContext) -> dict[str, torch.Tensor]:
    """Return the tensors of all pipeline stages; both stages of a tied weight hold the sum of its gradients."""
    return {name: tensor for stage in peers.pipeline.all_gather(tensors) for name, tensor in stage.items()}


def first_gradients(role: Role, lesson: Lesson, loss: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step, before clipping."""
    step = role.training
    step.set_training(True)
    step.accumulate(batch(0, lesson.tree), loss, lesson.mini_bs)
    step.set_training(False)
    step.optimizer.collect()
    if isinstance(step.optimizer, ZeroAdamW):
        found = whole_gradients(step.optimizer)
    else:
        found = {n: unsharded(local(p.grad), p).clone() for n, p in role.model.parameters() if p.grad is not None}
    step.optimizer.zero_grad()
    role.model.weights.release()
    return found


def whole_gradients(optimizer: ZeroAdamW) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter, gathered from the ranks' shards of the summed gradient."""
    flat = torch.empty(optimizer._share * optimizer.peers.data.size)
    for first, values in optimizer._gathered(optimizer._gradient.clone()):
        flat[first : first + len(values)] = values
    return {
        one.name: unsharded(flat[one.start : one.stop].view_as(local(one.parameter)), one.parameter).detach()
        for one in optimizer._segments
    }


class Trainee:
    """One rank."""

    def __init__(self, folder: Path, rank: int, _send: Any) -> None:
        self.folder, self.rank = folder, rank

    def learn(self, number: int, layout: Layout, lesson: Lesson) -> Learned | None:
        """Train in a layout if this rank is part of it; only the first rank returns tensors."""
        if self.rank >= layout.world_size:
            return None
        meeting = self.folder / str(number)
        meeting.mkdir(exist_ok=True)
        peers = connect(layout, self.rank, FolderRendezvous(meeting), CPU)
        try:
            found = learn(lesson, peers)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return found if peers.first else Learned(found.stats, {}, {}, found.held)


class Trainees:
    """A group of ranks, and the single process that they are compared with."""

    def __init__(self, count: int, folder: Path) -> None:
        self._ranks = [partial(Trainee, folder, rank) for rank in range(count)]
        self.group = WorkerGroup(self._ranks, stall_s=120)
        self._count = 0
        self._truths: dict[Lesson, Learned] = {}

    def learn(self, layout: Layout, lesson: Lesson) -> list[Learned]:
        """Return what each rank of a layout learned."""
        self._count += 1
        if self.group.failed:  # in an earlier test
            self.group = WorkerGroup(self._ranks, stall_s=120)
        return [found for found in self.group.call("learn", self._count, layout, lesson) if found is not None]

    def alone(self, lesson: Lesson) -> Learned:
        """Return what this process learns alone."""
        if lesson not in self._truths:
            self._truths[lesson] = learn(lesson, RankContext())
        return self._truths[lesson]
