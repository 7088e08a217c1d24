"""AdamW whose master weights and moments are spread over the replicas (ZeRO, Rajbhandari et al. 2020, stage 1).

Each replica holds the whole weights. All gradients lie in one flat fp32 buffer; its sum over the replicas is taken in
parts, each replica updates its part, and the updated parts are put together again. A rank of a model that is also spread by
tensor parallelism does so with its own part of it. Replicas on the CPUs of one machine hold the weights once for all of
them: each updates its part where all compute with it. What is saved is whole: it has the form of :class:`MasterAdamW`'s
state and continues in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.parallel.peers import Common, Peers
from areno.engine.parallel.sharding import is_whole, local, local_gradient, part_of, whole_of
from areno.engine.train.optimizer import GradientStats, OptimizerConfig, Paced, make_adam, take_moments

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Parameters and shares begin at multiples of so many entries, 64 bytes in 16 bits.
_ALIGN = 32
# Entries of a gradient that are looked at together, in double: as many as a CPU's cache holds, or a GPU's memory spares.
_LOOK, _LOOK_ON_GPU = 1 << 18, 1 << 24


@dataclass(frozen=True, slots=True)
class _Segment:
    """A parameter's place in the flat buffers.

    Attributes:
        name: of the parameter.
        parameter: the model's own.
        start: its first entry.
        stop: behind its last one.
        copies: ranks of a replica that hold these very entries.
        partial: each of them sees only a part of the gradient.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    copies: int
    partial: bool


class ShardedAdamW(Paced):
    """AdamW over a share of the parameters; every rank makes the same calls.

    Unlike :class:`MasterAdamW` it cannot tell a parameter without a gradient from one whose gradient is 0.

    Args:
        parameters: named parameters, tied ones once.
        config: rates, betas and decay.
        peers: the other ranks.
        partial: parameters that each rank of a replica holds whole but sees only a part of the gradient of.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        peers: Peers,
        partial: set[str] | frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(config)
        self.peers = peers
        self._segments = list(_segments(parameters, peers.layout.tp_size, partial))
        count = self._segments[-1].stop if self._segments else 0
        self._share = _aligned(-(-count // peers.data.size))
        self._first = self._share * peers.data.rank
        device = local(parameters[0][1]).device if parameters else torch.device("cpu")
        self._sums = peers.data.sums(self._share * peers.data.size, device)
        self._flat = self._sums.values
        self._filled: set[str] = set()
        self._common: Common | None = None
        self._share_weights()
        in_place = self._common is not None and self._weight_dtype == torch.float32
        self._master = nn.Parameter(self._own_weights() if in_place else self._own_part(self._read))
        self._gradient = torch.zeros(0, device=device)
        self._adam = make_adam([self._master], config)
        for segment in self._segments:
            self._watch(segment)

    def _watch(self, segment: _Segment) -> None:
        """Add every gradient of a parameter to the flat buffer as soon as it is there; the first replaces the last step's."""
        target = self._flat[segment.start : segment.stop]

        def accumulate(parameter: Tensor) -> None:
            gradient = local_gradient(parameter).reshape(-1)
            if segment.name in self._filled:
                target.add_(gradient)
            else:
                target.copy_(gradient)
                self._filled.add(segment.name)
            parameter.grad = None

        segment.parameter.register_post_accumulate_grad_hook(accumulate)

    @torch.no_grad()
    def _share_weights(self) -> None:
        """Let the model compute with weights that all replicas have in common, where that can be."""
        device, dtype = self._flat.device, self._weight_dtype
        whole = [segment.parameter for segment in self._segments]
        if device.type != "cpu" or not all(_can_move(parameter, dtype) for parameter in whole):
            return
        self._common = common = self.peers.data.common(len(self._flat), dtype)
        if common is None:
            return
        self._own_weights().copy_(self._own_part(self._read))
        common.barrier()
        for segment in self._segments:
            parameter = segment.parameter
            parameter.data = common.tensor(segment.start, parameter.numel()).view(parameter.shape)

    def _own_weights(self) -> Tensor:
        """This rank's share of the weights that the replicas have in common."""
        assert self._common is not None
        return self._common.tensor(self._first, self._share)

    @staticmethod
    def _read(segment: _Segment) -> Tensor:
        return local(segment.parameter.detach())

    @torch.no_grad()
    def _own_part(self, value: Callable[[_Segment], Tensor]) -> Tensor:
        """This rank's share of a flat tensor whose entries ``value`` gives parameter by parameter, in fp32."""
        part = torch.zeros(self._share, device=self._flat.device)
        for segment, start, stop in self._owned():
            entries = value(segment).reshape(-1)[start - segment.start : stop - segment.start]
            part[start - self._first : stop - self._first] = entries.to(part)
        return part

    def _owned(self) -> Iterator[tuple[_Segment, int, int]]:
        """Segments that lie in this rank's share, with the range that does."""
        for segment in self._segments:
            start, stop = max(segment.start, self._first), min(segment.stop, self._first + self._share)
            if start < stop:
                yield segment, start, stop

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._gradient = self._gradient.new_zeros(0)
        self._filled.clear()

    @torch.no_grad()
    def collect(self) -> GradientStats:
        """Sum the gradient over the ranks, and look at it."""
        for segment in self._segments:
            if segment.name not in self._filled:
                self._flat[segment.start : segment.stop].zero_()
        self._sum_partial()
        self._gradient = self._sums.part()
        # In double: counts beyond 2^24 must stay exact.
        found = torch.zeros(4, dtype=torch.float64, device=self._flat.device)
        look = _LOOK if found.device.type == "cpu" else _LOOK_ON_GPU
        for segment, start, stop in self._owned():
            for piece in self._gradient[start - self._first : stop - self._first].split(look):
                square = torch.linalg.vector_norm(piece, dtype=torch.float64).square()
                found[:2] += torch.stack([square, torch.count_nonzero(piece).double()]) / segment.copies
            found[2] += (stop - start) / segment.copies
        found[3] = float(bool(self._filled))
        square, nonzero, total, seen = self.peers.tensor.sum(self.peers.data.sum(found)).tolist()
        return GradientStats(square**0.5, round(nonzero), round(total) if seen else 0)

    def _sum_partial(self) -> None:
        """Sum what each rank of a replica has seen a part of, all at once."""
        parts = [self._flat[segment.start : segment.stop] for segment in self._segments if segment.partial]
        if parts:
            summed = self.peers.tensor.sum(torch.cat(parts))
            for part, values in zip(parts, summed.split([len(part) for part in parts]), strict=True):
                part.copy_(values)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the collected gradient."""
        self._gradient.mul_(factor)

    @torch.no_grad()
    def step(self) -> float:
        """Apply the collected gradient, and share the new weights; returns the learning rate that was used."""
        rate = self.learning_rate
        self.steps += 1
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._master.grad = self._gradient
        self._adam.step()
        self._master.grad = None
        self._publish()
        return rate

    def _publish(self) -> None:
        """Put the masters into the model, on all replicas."""
        if self._common is None:
            self._put_weights(self.peers.data.join(self._master.detach().to(self._weight_dtype)))
            return
        if self._weight_dtype != torch.float32:
            self._own_weights().copy_(self._master)
        self._common.barrier()

    def allocate(self) -> None:
        """Take the memory that the first step would take; nothing else changes."""
        take_moments(self._adam)

    def state_bytes(self) -> int:
        """Bytes of moments and master weights of all ranks together, as a checkpoint holds them."""
        count = sum(segment.parameter.numel() for segment in self._segments)
        return count * (8 if self._weight_dtype == torch.float32 else 12)

    @property
    def _weight_dtype(self) -> torch.dtype:
        return self._segments[0].parameter.dtype if self._segments else torch.float32

    @torch.no_grad()
    def _put_weights(self, flat: Tensor) -> None:
        for segment in self._segments:
            target = local(segment.parameter)
            target.copy_(flat[segment.start : segment.stop].view_as(target))

    def state_dict(self) -> dict[str, Any]:
        """The state of a :class:`MasterAdamW` with the same history; whole tensors on every rank."""
        moments = self._adam.state.get(self._master, {})
        adam: dict[int, dict[str, Tensor]] = {}
        for key in _MOMENTS if moments else ():
            for index, tensor in enumerate(self._wholes(moments[key])):
                adam.setdefault(index, {"step": torch.tensor(float(moments["step"]))})[key] = tensor
        names = [segment.name for segment in self._segments]
        rounded = self._weight_dtype != torch.float32
        masters = dict(zip(names, self._wholes(self._master.detach()), strict=True)) if rounded else {}
        return {
            "steps": self.steps,
            "constant_rate": self._constant_rate,
            "names": names,
            "adam": adam,
            "masters": masters,
        }

    @torch.no_grad()
    def _wholes(self, part: Tensor) -> Iterator[Tensor]:
        """Every parameter's values, from the ranks' shares of them."""
        flat = self.peers.data.join(part.contiguous())
        for segment in self._segments:
            own = flat[segment.start : segment.stop].view_as(local(segment.parameter))
            yield whole_of(own, segment.parameter).detach().cpu()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of any layout.

        Raises:
            ValueError: the state belongs to other parameters or another compute type.
        """
        names = [segment.name for segment in self._segments]
        rounded = self._weight_dtype != torch.float32
        if state["names"] != names or set(state["masters"]) != (set(names) if rounded else set()):
            raise ValueError("the saved optimizer belongs to another model or --dtype")
        self.steps, self._constant_rate = int(state["steps"]), state.get("constant_rate")
        order = {name: index for index, name in enumerate(names)}

        def saved(key: str) -> Callable[[_Segment], Tensor]:
            return lambda segment: part_of(
                state["adam"][order[segment.name]][key].to(self._flat.device), segment.parameter
            )

        self._master.data.copy_(
            self._own_part(lambda segment: part_of(state["masters"][segment.name], segment.parameter))
            if rounded
            else self._own_part(self._read)
        )
        if state["adam"]:
            count = next(iter(state["adam"].values()))["step"]
            own = {"step": count.clone(), **{key: self._own_part(saved(key)) for key in _MOMENTS}}
            self._adam.load_state_dict({"state": {0: own}, "param_groups": self._adam.state_dict()["param_groups"]})


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _can_move(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether it may lie anywhere: the whole of it is here, entry by entry in order."""
    return type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.dtype == dtype


def _segments(
    parameters: Sequence[tuple[str, nn.Parameter]], tp_size: int, partial: set[str] | frozenset[str]
) -> Iterator[_Segment]:
    start = 0
    for name, parameter in parameters:
        stop = start + local(parameter).numel()
        copies = tp_size if is_whole(parameter) else 1
        yield _Segment(name, parameter, start, stop, copies, name in partial and tp_size > 1)
        start = _aligned(stop)
