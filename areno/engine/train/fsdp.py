"""AdamW over weights that are spread over the replicas (FSDP2): each rank updates its share of every tensor.

The shares are the fp32 master weights. Their gradients come summed over the replicas from each backward pass; weights are
not shared out after an update, because whoever computes with them next puts them together. What is saved is whole: it has the
form of :class:`MasterAdamW`'s state and continues in any layout.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areno.engine.parallel.peers import Peers
from areno.engine.parallel.sharding import local, part_of, whole_of
from areno.engine.train.optimizer import MOMENTS, GradientStats, Optimizer, OptimizerConfig, by_name, make_adam


class SpreadAdamW(Optimizer):
    """AdamW over this rank's shares; every rank makes the same calls, while no weights are put together."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        peers: Peers,
        dtype: torch.dtype,
        partial: Collection[str] = (),
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(config)
        self.peers, self.is_part = peers, peers.layout.pp_size > 1
        self._tied = [name in tied for name, _ in parameters]
        self._partial = [name in partial for name, _ in parameters]
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._shares = [nn.Parameter(local(parameter.detach())) for parameter in self._parameters]  # the same memory
        self._rounded = dtype != torch.float32
        self._adam = make_adam(self._shares, config)

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            parameter.grad = share.grad = None

    @torch.no_grad()
    def collect(self) -> GradientStats:
        """Look at the gradient, which every backward pass has summed over the ranks."""
        # In double: counts beyond 2^24 must stay exact.
        found = torch.zeros(3, dtype=torch.float64, device=self._shares[0].device)
        kinds = zip(self._partial, self._tied, strict=True)
        for parameter, share, (partial, tied) in zip(self._parameters, self._shares, kinds, strict=True):
            share.grad = None if parameter.grad is None else local(parameter.grad)
            if share.grad is not None:
                if partial:
                    self.peers.tensor.sum(share.grad)
                if tied:
                    self.peers.ends.sum(share.grad)
                numbers = [share.grad.double().square().sum(), torch.count_nonzero(share.grad), share.grad.numel()]
                copies = self._copies(parameter) * (2 if tied else 1)
                found += torch.tensor(numbers, dtype=torch.float64, device=found.device) / copies
        square, nonzero, total = self.peers.pipeline.sum(self.peers.stage.sum(found)).tolist()
        return GradientStats(square**0.5, round(nonzero), round(total))

    def _copies(self, parameter: Tensor) -> int:
        """How many ranks hold the entries of this rank's share."""
        assert isinstance(parameter, DTensor)
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        return self.peers.stage.size // math.prod(size for placement, size in sizes if not placement.is_replicate())

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the collected gradient."""
        torch._foreach_mul_([share.grad for share in self._shares if share.grad is not None], factor)

    @torch.no_grad()
    def step(self) -> float:
        """Apply the collected gradient; returns the learning rate that was used."""
        return self._update()

    def state_bytes(self) -> int:
        """Bytes of moments and master weights of all ranks together, as a checkpoint holds them."""
        return sum(p.numel() for p in self._parameters) * (12 if self._rounded else 8)

    def held_bytes(self, moments: bool = True) -> int:
        """Bytes of this rank's shares, which are the master weights, and of their moments, there yet or not."""
        return sum(share.numel() for share in self._shares) * (12 if moments else 4)

    def gradients(self) -> list[Tensor]:
        """Gradients of this rank's shares, as far as there are any."""
        return [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    def step_bytes(self, device: torch.device) -> int:
        """Nothing worth counting: a step updates the shares where they are."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The state of a :class:`MasterAdamW` with the same history: whole tensors, on the first rank of a stage."""
        adam: dict[int, dict[str, Tensor]] = {}
        masters: dict[str, Tensor] = {}
        for index, (name, parameter, share) in enumerate(zip(self._names, self._parameters, self._shares, strict=True)):
            if moments := self._adam.state.get(share):
                adam[index] = {"step": moments["step"].detach().clone()}
                adam[index] |= {key: self._whole(moments[key], parameter) for key in MOMENTS}
            if self._rounded:
                masters[name] = self._whole(share.detach(), parameter)
        return {**self._head(self._names), "adam": adam, "masters": masters}

    def _whole(self, share: Tensor, like: Tensor) -> Tensor:
        """A tensor from its shares, in the computer's memory; empty on all ranks but the first of each stage."""
        whole = whole_of(share, like)
        return whole.cpu() if self.peers.heads else torch.empty(0)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of any layout."""
        self._take_head(state, self._names, self._names if self._rounded else ())
        own: dict[int, dict[str, Tensor]] = {}
        states = by_name(state)
        for index, (name, parameter, share) in enumerate(zip(self._names, self._parameters, self._shares, strict=True)):
            if self._rounded:
                share.copy_(part_of(state["masters"][name], parameter))
            if saved := states.get(name):
                own[index] = {"step": saved["step"]} | {key: part_of(saved[key], parameter) for key in MOMENTS}
        self._adam.load_state_dict({"state": own, "param_groups": self._adam.state_dict()["param_groups"]})
