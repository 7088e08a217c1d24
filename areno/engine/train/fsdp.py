"""AdamW over fully sharded weights (FSDP2): each rank updates its shard of every tensor.

The shards are the fp32 master weights. Each backward pass reduces the gradients of the shards over the ranks. Weights
are not gathered after an update, because the next forward pass gathers them layer by layer. Each rank saves its shards.
A run in any layout can resume from the saved shards.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areno.engine.parallel.parts import is_first_copy, local, positions
from areno.engine.parallel.rank_context import RankContext
from areno.engine.train import adam_8bit
from areno.engine.train.optimizer import (
    MOMENTS,
    GradientStats,
    Optimizer,
    OptimizerOptions,
    is_rounded,
    make_adam,
    master_key,
    moment_key,
    saved_master,
    saved_moments,
)
from areno.engine.train.state_files import SavedState, StatePart

_CHUNK = 1 << 22  # numbers converted to fp64 at a time


class FullyShardedAdamW(Optimizer):
    """AdamW over this rank's shards of the weights.

    All ranks must call the same methods in the same order, while the weights are sharded (not gathered). ``rounds`` is whether
    the model computes with rounded copies of its fp32 weights. ``partial`` names the parameters for which each tensor-parallel
    rank computes only a part of the gradient. ``tied`` names the parameters that the first and the last pipeline stage share.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        config: OptimizerOptions,
        peers: RankContext,
        rounds: bool,
        partial: Collection[str] = (),
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(config)
        self.peers, self.is_part = peers, peers.layout.pp_size > 1
        self._tied = [name in tied for name, _ in parameters]
        self._partial = [name in partial for name, _ in parameters]
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._shares = [nn.Parameter(self._master(parameter)) for parameter in self._parameters]
        meshes = [p.device_mesh.device_type for p in self._parameters if isinstance(p, DTensor)]
        # Device for collectives, even if shards are in host memory.
        self._device = torch.device(meshes[0] if meshes else "cpu")
        self._rounded = [rounds or is_rounded(parameter) for parameter in self._parameters]
        self._adam = make_adam(self._groups(), config)

    def _master(self, parameter: Tensor) -> Tensor:
        own = local(parameter.detach())
        return own.to("cpu" if self.config.offload else own.device, torch.float32, copy=self.config.offload)

    def _is_copied(self, parameter: Tensor) -> bool:
        return self.config.offload or is_rounded(parameter)

    def _groups(self) -> list[dict[str, Any]]:
        if not self.config.adam_8bit:
            return [{"params": self._shares}]
        kinds = [adam_8bit.is_quantised(parameter.numel()) for parameter in self._parameters]
        shares = list(zip(self._shares, kinds, strict=True))
        return [{"params": [s for s, own in shares if own == kind], "quantised": kind} for kind in (True, False)]

    def zero_grad(self) -> None:
        """Discard accumulated gradients."""
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            parameter.grad = share.grad = None

    @torch.no_grad()
    def collect(self) -> GradientStats:
        """Complete the sum of the gradients over the ranks, and return the gradient's statistics.

        FSDP has already reduced the gradients during the backward pass. This method then sums the gradients of parameters in
        ``partial`` over the tensor-parallel ranks, and of parameters in ``tied`` over the first and the last pipeline stage.
        """
        # In double: counts beyond 2^24 must stay exact.
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        kinds = zip(self._partial, self._tied, strict=True)
        for parameter, share, (partial, tied) in zip(self._parameters, self._shares, kinds, strict=True):
            share.grad = None
            if parameter.grad is not None:
                gradient = local(parameter.grad).to(self._device)
                if partial:
                    self.peers.tensor.all_reduce(gradient)
                if tied:
                    self.peers.ends.all_reduce(gradient)
                square = sum(part.double().square().sum() for part in gradient.reshape(-1).split(_CHUNK))
                numbers = [square, torch.count_nonzero(gradient), gradient.numel()]
                copies = self._copies(parameter) * (2 if tied else 1)
                totals += torch.tensor(numbers, dtype=torch.float64, device=totals.device) / copies
                share.grad = gradient.to(share)
        square, nonzero, total = self.peers.pipeline.all_reduce(self.peers.stage.all_reduce(totals)).tolist()
        return GradientStats(square**0.5, round(nonzero), round(total))

    def _copies(self, parameter: Tensor) -> int:
        """Return the number of ranks that hold the same shard of ``parameter`` as this rank, including this rank."""
        assert isinstance(parameter, DTensor)
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        return self.peers.stage.size // math.prod(size for placement, size in sizes if not placement.is_replicate())

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the collected gradient by ``factor``."""
        torch._foreach_mul_([share.grad for share in self._shares if share.grad is not None], factor)

    @torch.no_grad()
    def step(self) -> float:
        """See :meth:`Optimizer.step`."""
        rate = self._update()
        self._publish()
        return rate

    def _publish(self) -> None:
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            if self._is_copied(parameter):
                local(parameter.detach()).copy_(share)

    def state_bytes(self) -> int:
        """See :meth:`Optimizer.state_bytes`."""
        count = sum(p.numel() for p in self._parameters)
        moments = 8 * count if self.config.adam_8bit else self.config.moment_bytes(count)
        return moments + sum(
            4 * p.numel() for p, rounded in zip(self._parameters, self._rounded, strict=True) if rounded
        )

    def held_bytes(self, moments: bool = True) -> int:
        """See :meth:`Optimizer.held_bytes`."""
        pairs = list(zip(self._parameters, self._shares, strict=True))
        masters = sum(4 * share.numel() for parameter, share in pairs if self._is_copied(parameter))
        if not moments:
            return masters
        return masters + sum(
            self.config.moment_bytes(share.numel(), adam_8bit.is_quantised(parameter.numel()))
            for parameter, share in pairs
        )

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's shards. Shards without a gradient are skipped."""
        return [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    def step_bytes(self, device: torch.device) -> int:
        """Return 0 instead of an estimate, because no caller needs the estimate for FSDP."""
        return 0

    def state_head(self) -> dict[str, Any]:
        """See :meth:`Optimizer.state_head`."""
        return self._head(self._names, self._counts(self._names, self._shares), any(self._rounded))

    def state_parts(self) -> Iterator[StatePart]:
        """Yield this rank's shards of the moments. If the model does not compute in fp32, also yield the master weights.

        If several ranks hold the same shard, only the first of these ranks yields the shard.
        """
        kinds = zip(self._tied, self._rounded, strict=True)
        for name, parameter, share, (tied, rounded) in zip(
            self._names, self._parameters, self._shares, kinds, strict=True
        ):
            if (tied and self.peers.place.stage) or not self._is_first_copy(parameter):
                continue
            index = positions(parameter)
            for kind, values in self._moments(share, parameter).items():
                yield StatePart(moment_key(name, kind), values, index)
            if rounded:
                yield StatePart(master_key(name), share.detach(), index)

    def _is_first_copy(self, parameter: Tensor) -> bool:
        assert isinstance(parameter, DTensor)
        over_tensor = "tp" in (parameter.device_mesh.mesh_dim_names or ())
        return is_first_copy(parameter) and (over_tensor or self.peers.tensor.rank == 0)

    def _moments(self, share: nn.Parameter, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments of a shard in a dict whose keys are the names of the moments in a saved state.

        Moments in 8 bits are decoded to fp32, because the state may be loaded with another sharding, which has other
        quantization blocks.
        """
        moments = self._adam.state.get(share)
        if not moments:
            return {}
        if not self.config.adam_8bit:
            return {kind: moments[kind] for kind in MOMENTS}
        kinds = adam_8bit.moment_kinds(adam_8bit.is_quantised(parameter.numel()))
        pair = adam_8bit.moments_in(moments, share.numel())
        return {kind: values.reshape(share.shape) for kind, values in zip(kinds, pair, strict=True)}

    @torch.no_grad()
    def load_state(self, saved: SavedState) -> None:
        """See :meth:`Optimizer.load_state`."""
        self._take_head(saved.head, self._names, any(self._rounded))
        self._adam.state.clear()
        for name, parameter, share in zip(self._names, self._parameters, self._shares, strict=True):
            index = positions(parameter)
            share.copy_(saved_master(saved, name, local(parameter.detach()), index))
            if name in saved.head["counts"]:
                self._adam.state[share] = saved_moments(saved, name, parameter, index, self.config, share.device)
        self._publish()
