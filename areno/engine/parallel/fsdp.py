"""Fully sharded weights (FSDP2, ZeRO stage 3): the ranks of a stage shard the weights, and gather them for computation.

Between passes each rank holds a shard of every tensor. A training pass gathers one unit (by default a decoder layer) at a time.
With :attr:`Layout.reshards`, the backward pass gathers each unit again. The backward pass reduce-scatters the gradients.
Rollouts and scoring run many passes. All weights are therefore gathered once before these passes, in the compute dtype, and
released afterwards.

Shards of trained weights are fp32 and serve as the optimizer's master weights.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from areno.engine.model.packed_model import PackedModel, Weights
from areno.engine.parallel.experts import ExpertParallelExperts, shard_experts
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import RankContext
from areno.errors import UsageError

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP can reduce gradients of parameters that a backward pass does not use (PyTorch 2.13 or newer)."""


class FullyShardedWeights(Weights):
    """A model's weights, sharded across the default process group. This rank must have joined the group.

    Args:
        module: the model to shard. After construction, the module holds this rank's shards.
        trained: whether the model is trained. Shards of trained weights are fp32.
        reduces: dtype in which gradients are reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        peers: RankContext,
        device: torch.device,
        trained: bool,
        reduces: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = next(module.parameters()).dtype
        self.whole = False
        layout = peers.layout
        if layout.reads_once and layout.ep_size > 1:  # before the experts are sharded
            _receive(module, peers, set())
        mesh, expert_mesh = _mesh(module, layout, device), None
        self._experts: list[ExpertParallelExperts] = []
        if layout.ep_size > 1:
            sizes = (layout.shards // layout.ep_size, layout.ep_size, layout.tp_size)
            expert_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("efsdp", "ep", "tp"))
            self._experts = shard_experts(module, expert_mesh["ep", "tp"], peers.experts)
            expert_mesh = expert_mesh["efsdp"]
        mixtures = {id(divided.module) for divided in self._experts}
        # With an adapter, which is fp32 already, the other weights are frozen in the compute dtype.
        rounded = trained and self.dtype != torch.float32 and all(p.requires_grad for p in module.parameters())
        policy = MixedPrecisionPolicy(self.dtype if rounded else None, reduces)
        layers = [divided.module for divided in self._experts] + _units(module, layout.units)
        pinned = device.type == "cuda"  # page-locked memory transfers faster
        offload = CPUOffloadPolicy(pin_memory=pinned) if layout.offloads else OffloadPolicy()
        self._hooks: list[tuple[dict[int, Any], int, Any]] = []
        sharded: set[int] = set()
        for part in (*layers, module):  # module itself has the rest: embedding, last norm, output layer
            if layout.reads_once and layout.ep_size == 1:
                _receive(part, peers, sharded)
            if rounded:
                _to_fp32(part, sharded)
            known = {**part._forward_pre_hooks, **part._forward_hooks}
            own_mesh = expert_mesh if id(part) in mixtures else mesh
            fully_shard(
                part,
                mesh=own_mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=layout.reshards and part is not module,
            )
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                self._hooks += [(hooks, key, hook) for key, hook in hooks.items() if key not in known]
            sharded |= set(map(id, part.parameters()))
        self._root = cast(Any, module)
        self._parts: list[FSDPModule] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # the loss is already normalized over the rows of all ranks
            part.set_force_sum_reduction_for_comms(True)
            # An expert may get no tokens, and with a pipeline each backward pass uses only one model chunk.
            if REDUCES_UNUSED:
                part.set_reduce_scatter_unused_params(True, recurse=False)
        # FSDP treats the module whose forward runs first as the root, but body and head are called separately.
        self._root.areno_pass = lambda work: work()
        register_fsdp_forward_method(self._root, "areno_pass")
        self.run(lambda: torch.zeros(()))
        self.release()

    def gather(self) -> None:
        """Gather all weights, which stay gathered until :meth:`release` is called. Every rank must call this method.

        While the weights are gathered, FSDP's hooks are removed. The hooks would record which layers run, and the next backward
        pass would gather layers according to this record. In rollouts, ranks may run different numbers of passes, so their
        records would differ, and the ranks would gather different layers.
        """
        if self.whole:
            return
        for part in self._parts:
            part.unshard()
        for divided in self._experts:
            divided.gather()
        for hooks, key, _ in self._hooks:
            del hooks[key]
        self.whole = True

    def release(self) -> None:
        """Free the gathered weights, except this rank's shards."""
        for divided in self._experts:
            divided.release()
        for part in self._parts:
            part.reshard()
        if self.whole:
            for hooks, key, hook in self._hooks:
                hooks[key] = hook
        self.whole = False

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run a differentiable pass that gathers the weights of each layer when the layer runs."""
        if self.whole:
            return work()
        return self._root.areno_pass(work)  # type: ignore[no-any-return]


def shard_over_replicas(
    model: PackedModel, peers: RankContext, *, trained: bool, reduces: torch.dtype = torch.float32
) -> None:
    """Shard a model with FSDP (see :class:`FullyShardedWeights`). All ranks of the model's stage must call this function."""
    model.weights = FullyShardedWeights(model.module, peers, model.device, trained, reduces)


def _mesh(module: Any, layout: Layout, device: torch.device) -> DeviceMesh:
    if layout.tp_size == 1:
        return init_device_mesh(device.type, (layout.shards,), mesh_dim_names=("fsdp",))
    return module._mesh_manager.get_mesh("fsdp")  # type: ignore[no-any-return]


def _receive(part: nn.Module, peers: RankContext, known: set[int]) -> None:
    for parameter in part.parameters():
        if id(parameter) not in known:
            peers.broadcast_from_reader(parameter.detach())


def _units(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules that FSDP shards as units: those with a class name in ``names``, by default the decoder layers."""
    if not names:
        return [child for child in module.modules() if isinstance(child, GradientCheckpointingLayer)]
    blocks = [child for child in module.modules() if type(child).__name__ in names and child is not module]
    if missing := sorted(set(names) - {type(child).__name__ for child in blocks}):
        known = sorted(
            {type(child).__name__ for child in module.modules() if next(child.parameters(), None) is not None}
        )
        raise UsageError(
            f"fsdp.wrap_policy: {type(module).__name__} has no module of class {', '.join(missing)}; use "
            f"classes of its modules: {', '.join(known)}"
        )
    return blocks[::-1]  # inner modules first


def _to_fp32(part: nn.Module, but: set[int]) -> None:
    for parameter in part.parameters():
        if parameter.is_floating_point() and parameter.requires_grad and id(parameter) not in but:
            parameter.data = parameter.data.float()
