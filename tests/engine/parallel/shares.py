"""A rank of a sharded optimizer, with synthetic tensors and gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from areno.engine.parallel.parts import unsharded
from areno.engine.parallel.rank_context import connect
from areno.engine.parallel.rendezvous import FolderRendezvous
from areno.engine.parallel.workers import WorkerGroup
from areno.engine.train import sharded
from areno.engine.train.state_files import SavedState
from tests.support.optimizer_states import saved

# Larger and smaller than the smallest quantised size, and not divisible into whole blocks.
SHAPES = {"first": (70, 100), "norm": (50,), "odd": (4173,), "wide": (128, 96), "bias": (3,), "tall": (96, 130)}
SPREAD = {"wide": 0, "tall": 1}
"""Dimension that tensor parallelism shards."""


def weights_and_gradients(steps, dtype=torch.float32):
    """Return weights and, for each step, gradients of very different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: 10 ** (torch.rand(shape, generator=generator) * 3 - 4) for name, shape in SHAPES.items()}

    def draw(scale):
        return {name: torch.randn(SHAPES[name], generator=generator) * scale(name) for name in SHAPES}

    weights = {name: tensor.to(dtype) for name, tensor in draw(lambda _: 0.1).items()}
    return weights, [draw(lambda name: sizes[name]) for _ in range(steps)]


class Share:
    """One rank, which applies gradients with a sharded optimizer."""

    def __init__(self, layout, rank, folder, send) -> None:
        self.folder, self.runs = folder, 0
        self.peers = connect(layout, rank, FolderRendezvous(folder), torch.device("cpu"))
        tp_size = layout.tp_size
        self.mesh = DeviceMesh("cpu", list(range(tp_size))) if tp_size > 1 else None

    def run(self, config, weights, gradients, state=None, exchanged=1 << 24):
        """Apply gradients, a part on each replica; return weights, folder of the state, bytes and statistics."""
        sharded._EXCHANGED = exchanged
        parameters = {name: torch.nn.Parameter(self._placed(name, tensor)) for name, tensor in weights.items()}
        optimizer = sharded.ZeroAdamW(list(parameters.items()), config, self.peers)
        if state is not None:
            optimizer.load_state(SavedState(state))
        size, stats = self.peers.data.size, None
        # Powers of one half: they sum to the gradient without rounding.
        part = 0.5 ** min(self.peers.replica + 1, size - 1)
        for step in gradients:
            for name, parameter in parameters.items():
                loss = (parameter * self._placed(name, (step[name] * part).to(parameter.dtype))).sum()
                (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).backward()
            stats = optimizer.collect()
            optimizer.step()
            optimizer.zero_grad()
        wholes = {}
        for name, parameter in parameters.items():
            own = parameter.detach()
            wholes[name] = unsharded(own.to_local() if name in SPREAD and self.mesh else own, parameter)
        held = (optimizer.held_bytes(), optimizer.state_bytes(), optimizer.step_bytes(torch.device("cuda")))
        self.runs += 1
        return wholes, saved(optimizer, self.folder / f"state-{self.runs}", self.peers), held, stats

    def _placed(self, name, tensor):
        if self.mesh is None or name not in SPREAD:
            return tensor.clone()
        return distribute_tensor(tensor.clone(), self.mesh, [Shard(SPREAD[name])], src_data_rank=None)


def start(layout, folder):
    """Start the ranks of a layout."""
    folder.mkdir()
    return WorkerGroup([partial(Share, layout, rank, folder) for rank in range(layout.world_size)])
