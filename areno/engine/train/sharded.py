"""AdamW with master weights and moments sharded across the replicas (ZeRO stage 1, Rajbhandari et al. 2020).

Each replica holds all weights. All gradients are in one flat fp32 buffer, which is reduce-scattered over the replicas.
Each replica updates its shard of the weights. The updated shards are all-gathered in windows of limited size. With
tensor parallelism, only ranks that hold the same shard of the model exchange gradients and weights. If possible,
replicas on the CPUs of one Linux machine share one copy of the weights. In this case, each replica updates its shard in
place. Each rank saves its shard. A run in any layout can resume from the saved shards.

If the moments have 8 bits, the offset of each parameter and of each shard in the flat buffer is a multiple of the
quantization block size. The blocks are therefore the same for any number of replicas. For tensors sharded by tensor
parallelism, the blocks depend on the layout. When a run resumes in another layout, the moments of such tensors are
quantized again.

Master weights, moments and summed gradients may be in host memory instead of GPU memory. Data for a collective is then
first copied to the GPU.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.parallel.channels import Channel, SharedMemory
from areno.engine.parallel.parts import is_unsharded, local, local_gradient, positions
from areno.engine.parallel.rank_context import RankContext
from areno.engine.train import adam_8bit
from areno.engine.train.optimizer import (
    MOMENTS,
    GradientStats,
    Optimizer,
    OptimizerOptions,
    is_rounded,
    low_moments,
    make_adam,
    master_key,
    moment_key,
    saved_master,
)
from areno.engine.train.state_files import Index, SavedState, StatePart, flat_parts, full_index

# Parameters and shards are aligned to this many entries: 64 bytes, if an entry has 16 bits.
_ALIGN = 32
# Gradient entries converted to double precision at a time: as many as fit a CPU's cache, or add little to a GPU's memory.
_CHUNK, _CHUNK_ON_GPU = 1 << 18, 1 << 24
# Numbers per collective: 64 MiB in fp32; a process group may hold two more copies.
_EXCHANGED = 1 << 24
_COPIES = 3


@dataclass(frozen=True, slots=True)
class _Segment:
    """A parameter's range in the flat buffers."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    copies: int  # ranks of a replica that hold these entries
    partial: bool  # whether each of these ranks computes a partial gradient
    tied: bool  # whether the first and the last stage both have the parameter, each with a partial gradient

    @property
    def quantised(self) -> bool:
        """Whether the unsharded parameter is large enough that ``--adam-8bit`` quantizes its moments."""
        return adam_8bit.is_quantised(self.parameter.numel())


class ZeroAdamW(Optimizer):
    """AdamW over this rank's shard of the parameters. All ranks must make the same calls.

    A parameter without a gradient is updated with a gradient of 0, whereas :class:`MasterAdamW` does not change such a
    parameter. The parameters in ``partial`` are unsharded, but each rank of a replica computes only a part of their
    gradients. The parts are summed.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        config: OptimizerOptions,
        peers: RankContext,
        partial: set[str] | frozenset[str] = frozenset(),
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(config)
        self.peers, self.is_part = peers, peers.layout.pp_size > 1
        block = adam_8bit.BLOCK if config.adam_8bit else _ALIGN
        self._segments = list(_segments(parameters, peers.layout.tp_size, partial, tied, block))
        self._starts = [segment.start for segment in self._segments]
        count = self._segments[-1].stop if self._segments else 0
        self._share = -(-count // (peers.data.size * block)) * block
        self._first = self._share * peers.data.rank
        self._device = local(parameters[0][1]).device if parameters else torch.device("cpu")
        self._home = torch.device("cpu") if config.offload else self._device
        # The flat gradient is in memory shared by replicas, or else in memory that a step allocates and frees after reduction.
        self._reduce_buffer = peers.data.reduce_buffer(self._share * peers.data.size, self._device)
        self._flat = None if self._reduce_buffer is None else self._reduce_buffer.values
        self._filled: set[str] = set()
        self._gradient = torch.zeros(0, device=self._home)
        self._shared_memory: SharedMemory | None = None
        self._share_weights()
        in_place = self._shared_memory is not None and self._weight_dtype == torch.float32
        self._master = nn.Parameter(self._own_weights() if in_place else self._own_part(self._read))
        self._pieces = list(self._cut())
        self._adam = make_adam(self._groups(), config)
        for segment in self._segments:
            self._watch(segment)

    def _cut(self) -> Iterator[tuple[nn.Parameter, bool, slice]]:
        """Divide this rank's shard of the weights into the tensors that the optimizer updates.

        For each tensor, yield the tensor, whether its moments have 8 bits, and the slice of the shard that the tensor covers.
        With ``adam_8bit``, the shard is divided at the boundaries between parameters. Otherwise the whole shard is one
        tensor.
        """
        if not self.config.adam_8bit:
            yield self._master, False, slice(0, self._share)
            return
        for segment, start, stop in self._owned():
            place = slice(start - self._first, stop - self._first)
            yield nn.Parameter(self._master.detach()[place]), segment.quantised, place

    def _groups(self) -> list[dict[str, Any]]:
        if not self.config.adam_8bit:
            return [{"params": [self._master]}]
        return [
            {"params": [piece for piece, quantised, _ in self._pieces if quantised == kind], "quantised": kind}
            for kind in (True, False)
        ]

    def _watch(self, segment: _Segment) -> None:
        """Register a hook that accumulates the gradient of ``segment.parameter`` in the segment's range of the flat buffer.

        The first gradient of each step overwrites the old contents of the buffer.
        """

        def accumulate(parameter: Tensor) -> None:
            gradient = local_gradient(parameter).reshape(-1).to(self._home)
            target = self._buffer()[segment.start : segment.stop]
            if segment.name in self._filled:
                target.add_(gradient)
            else:
                target.copy_(gradient)
                self._filled.add(segment.name)
            parameter.grad = None

        segment.parameter.register_post_accumulate_grad_hook(accumulate)

    @torch.no_grad()
    def _share_weights(self) -> None:
        """If possible, move the model's weights to memory that all replicas share."""
        dtype = self._weight_dtype
        # Only unsharded, contiguous parameters can be moved.
        movable = all(
            type(p) is nn.Parameter and p.is_contiguous() and p.dtype == dtype
            for p in (segment.parameter for segment in self._segments)
        )
        if self._device.type != "cpu" or not movable:
            return
        self._shared_memory = common = self.peers.data.shared_memory(self._share * self.peers.data.size, dtype)
        if common is None:
            return
        self._fill(self._own_weights(), self._read)
        common.barrier()
        for segment in self._segments:
            parameter = segment.parameter
            parameter.data = common.tensor(segment.start, parameter.numel()).view(parameter.shape)

    def _own_weights(self) -> Tensor:
        assert self._shared_memory is not None
        return self._shared_memory.tensor(self._first, self._share)

    def _buffer(self) -> Tensor:
        if self._flat is None:
            self._flat = torch.zeros(self._share * self.peers.data.size, device=self._home)
        return self._flat

    @staticmethod
    def _read(segment: _Segment) -> Tensor:
        return local(segment.parameter.detach())

    @torch.no_grad()
    def _own_part(self, value: Callable[[_Segment], Tensor]) -> Tensor:
        part = torch.zeros(self._share, device=self._home)
        self._fill(part, value)
        return part

    def _fill(self, part: Tensor, value: Callable[[_Segment], Tensor]) -> None:
        for segment, start, stop in self._owned():
            self._put(part, value(segment), segment, start, stop)

    def _put(self, part: Tensor, values: Tensor, segment: _Segment, start: int, stop: int) -> None:
        entries = values.reshape(-1)[start - segment.start : stop - segment.start]
        part[start - self._first : stop - self._first] = entries.to(part)

    def _owned(self) -> Iterator[tuple[_Segment, int, int]]:
        return self._between(self._first, self._first + self._share)

    def _between(self, first: int, last: int) -> Iterator[tuple[_Segment, int, int]]:
        """Yield each segment that overlaps a range of the flat buffer, and the start and stop of the overlap."""
        for segment in self._segments[max(bisect_right(self._starts, first) - 1, 0) :]:
            if segment.start >= last:
                return
            start, stop = max(segment.start, first), min(segment.stop, last)
            if start < stop:
                yield segment, start, stop

    def zero_grad(self) -> None:
        """Discard accumulated gradients, and free their memory unless several replicas share it."""
        if self._reduce_buffer is None:
            self._flat = None
        self._gradient = self._gradient.new_zeros(0)
        self._filled.clear()

    def gradients(self) -> list[Tensor]:
        """Return a list with the flat gradient before its reduction over the ranks; [] if the gradient is not allocated."""
        return [] if self._flat is None else [self._flat]

    @torch.no_grad()
    def collect(self) -> GradientStats:
        """Reduce the gradient over the ranks, and return the gradient's statistics."""
        flat = self._buffer()
        for segment in self._segments:
            if segment.name not in self._filled:
                flat[segment.start : segment.stop].zero_()
        self._sum_partial(flat)
        if self._reduce_buffer is None:
            self._gradient, self._flat = self._summed(flat), None
        else:
            self._gradient = self._reduce_buffer.part()
        # In double: counts beyond 2^24 must stay exact.
        totals = torch.zeros(4, dtype=torch.float64, device=self._home)
        chunk = _CHUNK if self._home.type == "cpu" else _CHUNK_ON_GPU
        for segment, start, stop in self._owned():
            for piece in self._gradient[start - self._first : stop - self._first].split(chunk):
                square = torch.linalg.vector_norm(piece, dtype=torch.float64).square()
                totals[:2] += torch.stack([square, torch.count_nonzero(piece).double()]) / segment.copies
            totals[2] += (stop - start) / segment.copies
        totals[3] = float(bool(self._filled))
        totals = totals.to(self._device)
        for channel in (self.peers.data, self.peers.tensor, self.peers.pipeline):
            totals = channel.all_reduce(totals)
        square, nonzero, total, seen = totals.tolist()
        return GradientStats(square**0.5, round(nonzero), round(total) if seen else 0)

    def _sum_partial(self, flat: Tensor) -> None:
        self._sum_over(self.peers.tensor, [flat[one.start : one.stop] for one in self._segments if one.partial])
        self._sum_over(self.peers.ends, [flat[one.start : one.stop] for one in self._segments if one.tied])

    def _sum_over(self, ranks: Channel, parts: list[Tensor]) -> None:
        if parts:
            summed = ranks.all_reduce(torch.cat(parts).to(self._device))
            for part, values in zip(parts, summed.split([len(part) for part in parts]), strict=True):
                part.copy_(values)

    def _windows(self) -> Iterator[slice]:
        step = max(_EXCHANGED // self.peers.data.size, 1)
        for begin in range(0, self._share, step):
            yield slice(begin, min(begin + step, self._share))

    def _summed(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of ``flat``, summed over the replicas."""
        if self.peers.data.size == 1:
            return flat
        part = torch.empty(self._share, device=self._home)
        by_rank = flat.view(self.peers.data.size, -1)
        kind = torch.bfloat16 if self.config.reduce_bf16 else torch.float32
        for window in self._windows():
            sent = by_rank[:, window].reshape(-1).to(self._device, kind)
            part[window] = self.peers.data.reduce_scatter(sent).to(part)
        return part

    def _gathered(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        for window in self._windows():
            gathered = self.peers.data.all_gather_tensor(part[window].to(self._device).contiguous())
            for rank, piece in enumerate(gathered.view(self.peers.data.size, -1)):
                yield rank * self._share + window.start, piece

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the collected gradient by ``factor``."""
        self._gradient.mul_(factor)

    @torch.no_grad()
    def step(self) -> float:
        """See :meth:`Optimizer.step`."""
        for piece, _, place in self._pieces:
            piece.grad = self._gradient[place]
        rate = self._update()
        for piece, _, _ in self._pieces:
            piece.grad = None
        self._publish()
        return rate

    def _publish(self) -> None:
        if self._shared_memory is None:
            self._put_weights()
            return
        if self._weight_dtype != torch.float32:
            self._own_weights().copy_(self._master)
        self._shared_memory.barrier()

    def state_bytes(self) -> int:
        """See :meth:`Optimizer.state_bytes`."""
        counts = [(segment.parameter.numel(), is_unsharded(segment.parameter)) for segment in self._segments]
        masters = sum(4 * segment.parameter.numel() for segment in self._segments if is_rounded(segment.parameter))
        in_numbers = 8 if self.config.adam_8bit else 0  # moments of tensors sharded by tensor parallelism
        return masters + sum(
            self.config.moment_bytes(count) if full or not in_numbers else in_numbers * count for count, full in counts
        )

    def held_bytes(self, moments: bool = True) -> int:
        """See :meth:`Optimizer.held_bytes`."""
        masters = 0 if self._shared_memory is not None and self._weight_dtype == torch.float32 else 4 * self._share
        if not moments:
            return masters
        kept = [(piece.numel(), quantised) for piece, quantised, _ in self._pieces]
        return masters + sum(self.config.moment_bytes(*one) for one in kept)

    def step_bytes(self, device: torch.device) -> int:
        """See :meth:`Optimizer.step_bytes`."""
        several = self.peers.data.size > 1
        shared = several and device.type == "cpu"  # in shared memory, gradients are summed and weights updated in place
        exchanged = _COPIES * 4 * min(_EXCHANGED, self._share * self.peers.data.size)
        passing = exchanged if several and not (shared and self.peers.layout.tp_size == 1) else 0
        if self.config.offload:
            return passing
        own = 4 * self._share if several and not shared else 0
        return own + max(passing, self.config.working_bytes(device))

    @property
    def _weight_dtype(self) -> torch.dtype:
        kinds = {segment.parameter.dtype for segment in self._segments}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    @property
    def _has_masters(self) -> bool:
        return any(is_rounded(segment.parameter) for segment in self._segments)

    @torch.no_grad()
    def _put_weights(self) -> None:
        for first, values in self._gathered(self._master.detach().to(self._weight_dtype)):
            for segment, start, stop in self._between(first, first + len(values)):
                target = local(segment.parameter).view(-1)
                target[start - segment.start : stop - segment.start] = values[start - first : stop - first]

    def state_head(self) -> dict[str, Any]:
        """See :meth:`Optimizer.state_head`."""
        names = [segment.name for segment in self._segments]
        counted = names if self.steps and not self.config.sgd else []
        return self._head(names, dict.fromkeys(counted, self.steps), self._has_masters)

    def state_parts(self) -> Iterator[StatePart]:
        """See :meth:`Optimizer.state_parts`."""
        pieces = iter(self._pieces)
        for segment, start, stop in self._owned():
            piece = next(pieces)[0] if self.config.adam_8bit else self._master
            if (segment.tied and self.peers.place.stage) or (
                is_unsharded(segment.parameter) and self.peers.tensor.rank
            ):
                continue
            place, index = slice(start - self._first, stop - self._first), positions(segment.parameter)
            first = start - segment.start
            if self.config.adam_8bit:
                yield from self._low_parts(segment, self._adam.state.get(piece, {}), piece.numel(), first, index)
            elif self.steps and not self.config.sgd:
                for kind in MOMENTS:
                    yield from flat_parts(
                        moment_key(segment.name, kind), self._adam.state[piece][kind][place], first, index
                    )
            if is_rounded(segment.parameter):
                yield from flat_parts(master_key(segment.name), self._master.detach()[place], first, index)

    @staticmethod
    def _low_parts(
        segment: _Segment, state: dict[str, Any], count: int, first: int, index: Index
    ) -> Iterator[StatePart]:
        """Yield the moments of a parameter, but only for those entries of the parameter that are in this rank's shard.

        If tensor parallelism does not shard the parameter, 8-bit moments are yielded as codes and scales, because the
        quantization blocks do not depend on the layout. All other moments are yielded as fp32 numbers.
        """
        if not state:
            return
        if segment.quantised and is_unsharded(segment.parameter):
            for kind, values in state.items():
                if kind != "step":
                    rows = torch.arange(len(values)) + first // adam_8bit.BLOCK
                    yield StatePart(moment_key(segment.name, kind), values, (rows, *full_index(values.shape[1:])))
            return
        kinds = adam_8bit.moment_kinds(segment.quantised)
        for kind, values in zip(kinds, adam_8bit.moments_in(state, count), strict=True):
            yield from flat_parts(moment_key(segment.name, kind), values, first, index)

    @torch.no_grad()
    def load_state(self, saved: SavedState) -> None:
        """See :meth:`Optimizer.load_state`."""
        names = [segment.name for segment in self._segments]
        self._take_head(saved.head, names, self._has_masters)

        def master(segment: _Segment) -> Tensor:
            return saved_master(saved, segment.name, self._read(segment), positions(segment.parameter))

        self._master.data.copy_(self._own_part(master))
        self._adam.state.clear()
        if saved.head["counts"]:
            self._take_moments(saved)

    def _take_moments(self, saved: SavedState) -> None:
        flat = [torch.zeros(self._share, device=self._home) for _ in MOMENTS]
        for segment, start, stop in self._owned():
            for part, values in zip(flat, self._saved_moments(saved, segment), strict=True):
                self._put(part, values, segment, start, stop)
        count = max(saved.head["counts"].values())
        for piece, quantised, place in self._pieces:
            first, second = (moment[place] for moment in flat)
            if self.config.adam_8bit:
                self._adam.state[piece] = adam_8bit.state_of(count, first.clone(), second.clone(), quantised)
            else:
                step = torch.tensor(float(count), device=self._home)
                kind = torch.bfloat16 if self.config.adam_bf16 else torch.float32
                self._adam.state[piece] = {"step": step, "exp_avg": first.to(kind), "exp_avg_sq": second.to(kind)}

    def _saved_moments(self, saved: SavedState, segment: _Segment) -> tuple[Tensor, ...]:
        index = positions(segment.parameter)
        if segment.name not in saved.head["counts"]:  # saved by one process, where it never had a gradient
            return (torch.zeros(local(segment.parameter).shape),) * len(MOMENTS)
        if self.config.adam_8bit:
            return low_moments(saved, segment.name, segment.parameter, index)
        return tuple(saved.read(moment_key(segment.name, kind), index) for kind in MOMENTS)


def _segments(
    parameters: Sequence[tuple[str, nn.Parameter]],
    tp_size: int,
    partial: Collection[str],
    tied: Collection[str],
    block: int,
) -> Iterator[_Segment]:
    start = 0
    for name, parameter in parameters:
        stop = start + local(parameter).numel()
        copies = (tp_size if is_unsharded(parameter) else 1) * (2 if name in tied else 1)
        yield _Segment(name, parameter, start, stop, copies, name in partial and tp_size > 1, name in tied)
        start = -(-stop // block) * block
