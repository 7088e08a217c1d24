"""Expert parallelism: ranks divide the experts of each MoE layer and dispatch tokens to the experts (Lepikhin et al. 2020,
arXiv:2006.16668).

The ranks of a group divide the experts of each MoE layer evenly: with E experts and e ranks, each rank holds E / e experts. In
each layer, one all-to-all sends every token to the ranks with its experts. A second all-to-all returns the experts' outputs.
Each rank computes its experts with the ``forward`` of the model's experts module, so this code is independent of the
architecture. No token is dropped, even if the routing is unbalanced.

All ranks of a group must make the same number of passes, except during generation. Before generation begins, every rank gathers
the weights of all experts. Until these gathered weights are freed, no tokens are sent.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from areno.engine.model.attention import Forward
from areno.engine.parallel.channels import Channel
from areno.errors import UnsupportedModelError, UsageError


class _Route(torch.autograd.Function):
    """Send rows to the ranks, and return the rows that arrive from them.

    ``sent[i]`` is the number of rows for rank i. ``received[i]`` is the number of rows from rank i. ``rows`` has the shape
    [sum(sent), ...] and is sorted by receiver. The result has the shape [sum(received), ...] and is sorted by sender.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], channel: Channel) -> Tensor:
        ctx.sizes, ctx.channel = (received, sent), channel
        return channel.all_to_all_v(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.channel.all_to_all_v(grad.contiguous(), *ctx.sizes), None, None, None


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of an MoE layer, stacked along the first axis of each tensor."""
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return type(module).__name__.endswith("Experts") and bool(own) and all(len(p) == count for p in own)


class ExpertParallelExperts:
    """The experts of one MoE layer, sharded across a group.

    Args:
        module: module with all experts. After construction, the module holds only this rank's experts.
        mesh: device mesh with the axes ``ep`` and ``tp``.
        channel: collectives of the ranks across which the experts are sharded.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, channel: Channel) -> None:
        self.module, self.channel = cast(Any, module), channel
        self.total = self.module.num_experts
        self.own = self.total // channel.size
        self._gathered: dict[str, Tensor] | None = None
        self._forward: Forward = module.forward
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, self._part(parameter, mesh))
        self.module.num_experts = self.own
        self.module.forward = self._dispatch

    def _part(self, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        tensor: Placement = Replicate()
        values = parameter.detach()
        if isinstance(values, DTensor):
            [tensor], values = values.placements, values.to_local()
        mine = values[self.channel.rank * self.own :][: self.own].clone()
        divided = DTensor.from_local(
            mine, mesh, [Shard(0), tensor], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return nn.Parameter(divided, requires_grad=parameter.requires_grad)

    def gather(self) -> None:
        """Gather all experts. FSDP must already have unsharded the local experts, and all ranks must call this method."""
        self._gathered = {}
        for name, parameter in self.module.named_parameters(recurse=False):
            mine = parameter.detach().to_local()
            self._gathered[name] = self.channel.all_gather_tensor(mine.reshape(-1)).view(self.total, *mine.shape[1:])
        self.module.num_experts = self.total

    def release(self) -> None:
        """Free the gathered weights of the other ranks' experts."""
        self._gathered = None
        self.module.num_experts = self.own

    def _computed(self, *inputs: Tensor) -> Tensor:
        """Run the module's own ``forward`` on plain tensors.

        If all experts have been gathered, the module computes all experts, otherwise only this rank's experts.
        """
        sharded = dict(self.module._parameters)
        local = self._gathered or {name: cast(Any, parameter).to_local() for name, parameter in sharded.items()}
        self.module._parameters.update(local)
        try:
            return self._forward(*inputs)
        finally:
            self.module._parameters.update(sharded)

    def _dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Send each row of ``hidden`` [T, C] to its ``chosen`` [T, K] experts. Return weighted sums [T, C] of the outputs."""
        if self._gathered is not None:
            return self._computed(hidden, chosen, weights)
        each = chosen.shape[1]
        experts, order = chosen.flatten().sort(stable=True)
        sent = torch.bincount(experts // self.own, minlength=self.channel.size)
        sizes = sent.tolist(), self.channel.all_to_all(sent).tolist()
        rows = hidden.index_select(0, order // each)
        arrived = _Route.apply(rows, *sizes, self.channel)
        local = self.channel.all_to_all_v(experts % self.own, *sizes)
        outputs = self._computed(arrived, local[:, None], torch.ones_like(local, dtype=weights.dtype)[:, None])
        if not len(arrived):  # the backward pass must still reach the all-to-all that other ranks wait for
            outputs = (
                outputs
                + arrived
                + sum(p.to_local().flatten()[:1].sum() * 0 for p in self.module.parameters(recurse=False))
            )
        back = _Route.apply(outputs, *reversed(sizes), self.channel)
        scaled = back * weights.flatten()[order][:, None]
        return torch.zeros_like(hidden).index_add(0, order // each, scaled.to(hidden.dtype))


def shard_experts(module: nn.Module, mesh: DeviceMesh, channel: Channel) -> list[ExpertParallelExperts]:
    """Shard the experts of every MoE layer across a group.

    Raises:
        UnsupportedModelError: the model has no experts, or the group's size does not divide their number.
        UsageError: the experts have adapters.
    """
    layers = (cast(Any, child).get_base_layer() for child in module.modules() if hasattr(child, "get_base_layer"))
    if any(is_experts(layer) for layer in layers):
        raise UsageError(
            f"LoRA cannot train the experts of {type(module).__name__} with expert parallelism over {channel.size} ranks, "
            "because adapters of experts cannot be sharded; remove expert parallelism (e) from the layout, or list only "
            "attention layers in --lora-target-modules (target_modules)"
        )
    mixtures = [child for child in module.modules() if is_experts(child)]
    if not mixtures:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no experts to divide among {channel.size} ranks; remove expert parallelism (e) "
            "from the layout"
        )
    counts = {int(cast(Any, child).num_experts) for child in mixtures}
    if wrong := sorted(count for count in counts if count % channel.size):
        raise UnsupportedModelError(
            f"{type(module).__name__} has {wrong[0]} experts, which {channel.size} ranks cannot divide evenly; set expert "
            f"parallelism (e) to {_below(wrong[0], channel.size)}"
        )
    return [ExpertParallelExperts(child, mesh, channel) for child in mixtures]


def _below(count: int, size: int) -> int:
    return next(divisor for divisor in range(size, 0, -1) if count % divisor == 0)
