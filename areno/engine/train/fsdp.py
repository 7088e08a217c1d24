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

from areno.engine.parallel.parts import local, part_of, whole_of
from areno.engine.parallel.peers import Peers
from areno.engine.train import adam_8bit
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
        self._shares = [nn.Parameter(self._master(parameter)) for parameter in self._parameters]
        meshes = [p.device_mesh.device_type for p in self._parameters if isinstance(p, DTensor)]
        self._device = torch.device(meshes[0] if meshes else "cpu")  # ranks talk there, wherever shares wait
        self._rounded = dtype != torch.float32
        self._adam = make_adam(self._groups(), config)

    def _master(self, parameter: Tensor) -> Tensor:
        """What the rule updates: this rank's share itself, or with ``offload`` a copy in the computer's memory."""
        own = local(parameter.detach())
        return own.to("cpu", copy=True) if self.config.offload else own

    def _groups(self) -> list[dict[str, Any]]:
        """Shares of tensors; those whose moments are in 8 bits are apart, by the size of the whole tensor in every layout."""
        if not self.config.adam_8bit:
            return [{"params": self._shares}]
        kinds = [adam_8bit.is_quantised(parameter.numel()) for parameter in self._parameters]
        shares = list(zip(self._shares, kinds, strict=True))
        return [{"params": [s for s, own in shares if own == kind], "quantised": kind} for kind in (True, False)]

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            parameter.grad = share.grad = None

    @torch.no_grad()
    def collect(self) -> GradientStats:
        """Look at the gradient, which every backward pass has summed over the ranks."""
        # In double: counts beyond 2^24 must stay exact.
        found = torch.zeros(3, dtype=torch.float64, device=self._device)
        kinds = zip(self._partial, self._tied, strict=True)
        for parameter, share, (partial, tied) in zip(self._parameters, self._shares, kinds, strict=True):
            share.grad = None
            if parameter.grad is not None:
                gradient = local(parameter.grad).to(self._device)
                if partial:
                    self.peers.tensor.sum(gradient)
                if tied:
                    self.peers.ends.sum(gradient)
                numbers = [gradient.double().square().sum(), torch.count_nonzero(gradient), gradient.numel()]
                copies = self._copies(parameter) * (2 if tied else 1)
                found += torch.tensor(numbers, dtype=torch.float64, device=found.device) / copies
                share.grad = gradient.to(share.device)
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
        rate = self._update()
        self._publish()
        return rate

    def _publish(self) -> None:
        if self.config.offload:
            for parameter, share in zip(self._parameters, self._shares, strict=True):
                local(parameter.detach()).copy_(share)

    def state_bytes(self) -> int:
        """Bytes of moments and master weights of all ranks together, as a checkpoint holds them."""
        count = sum(p.numel() for p in self._parameters)
        return self.config.moment_bytes(count) + (4 * count if self._rounded else 0)

    def held_bytes(self, moments: bool = True) -> int:
        """Bytes of this rank's shares, which are the master weights, and of their moments, there yet or not."""
        count = sum(share.numel() for share in self._shares)
        return 4 * count + (self.config.moment_bytes(count) if moments else 0)

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
                adam[index] = self._whole_moments(moments, parameter, share)
            if self._rounded:
                masters[name] = self._whole(share.detach(), parameter)
        return {**self._head(self._names), "adam": adam, "masters": masters}

    def _whole_moments(self, moments: dict[str, Any], parameter: Tensor, share: Tensor) -> dict[str, Any]:
        if not self.config.adam_8bit:
            found = {"step": moments["step"].detach().clone()}
            return found | {key: self._whole(moments[key], parameter) for key in MOMENTS}
        parts = adam_8bit.moments_in(moments, share.numel())
        mean, second = (self._whole(part.reshape(share.shape), parameter) for part in parts)
        return adam_8bit.state_of(moments["step"], mean, second, adam_8bit.is_quantised(parameter.numel()))

    def _whole(self, share: Tensor, like: Tensor) -> Tensor:
        """A tensor from its shares, in the computer's memory; empty on all ranks but the first of each stage."""
        whole = whole_of(share.to(self._device), like)
        return whole.cpu() if self.peers.heads else torch.empty(0)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of any layout."""
        self._take_head(state, self._names, self._names if self._rounded else ())
        states = by_name(state)
        self._adam.state.clear()
        for name, parameter, share in zip(self._names, self._parameters, self._shares, strict=True):
            if self._rounded:
                share.copy_(part_of(state["masters"][name], parameter))
            if saved := states.get(name):
                own = self._own_moments(saved, parameter)
                self._adam.state[share] = {
                    key: value.clone().to(share.device) if isinstance(value, Tensor) else value
                    for key, value in own.items()
                }
        self._publish()

    def _own_moments(self, saved: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """This rank's part of the moments of a parameter."""
        if not self.config.adam_8bit:
            return {"step": saved["step"]} | {key: part_of(saved[key], parameter) for key in MOMENTS}
        wholes = adam_8bit.moments_in(saved, parameter.numel())
        mean, second = (part_of(whole.view(parameter.shape), parameter) for whole in wholes)
        return adam_8bit.state_of(saved["step"], mean, second, adam_8bit.is_quantised(parameter.numel()))
