"""One decode step on the device: body, logits and sampling over static buffers, captured in a CUDA graph per batch size.

A step needs nothing from the host but a few numbers per row: where its token comes from (the last step's output, still on
the device, or the host), its position and its token index. So the next step can be launched before the tokens of the last
one have been read. On a CPU, with ``--eager-decode``, or where attention cannot be captured, the same program runs eagerly.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.engine.model.attention import IMPLEMENTATIONS
from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.compiled.traced import plain_draw
from areno.engine.rollout.counter_rng import as_int64, random_bits
from areno.engine.rollout.kv_cache import READ_STEP, ROW_STEP
from areno.engine.rollout.paged.backends import GATHER, Backend, best_backend
from areno.engine.rollout.paged.cache import PagedCache
from areno.engine.rollout.paged.capture import CaptureError, GraphSet, why_not_captured
from areno.engine.rollout.paged.plans import PagedDecodePlan, open_cells
from areno.engine.rollout.scheduler import round_up
from areno.errors import EngineError
from areno.types import SamplingParams

logger = logging.getLogger(__name__)

# Columns of the step buffer.
_SOURCE, _GIVEN, _POSITION, _COUNTER, _SEED = range(5)


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one row of the batch does in a step."""

    position: int  # of the token it feeds; -1 when it does not take part
    counter: int  # index of the token it samples
    source: int  # row of the last step whose token it feeds; -1: it feeds ``token``
    token: int  # known to the host
    seed: int  # of its sample
    sampling: SamplingParams  # temperature or greedy; the rest must be off


PAUSED = StepRow(-1, 0, -1, 0, 0, SamplingParams(greedy=True))


@dataclass(slots=True)
class StepResult:
    """Tokens and log-probs of a launched step, on their way to the host."""

    values: Tensor
    event: Any = None

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the step; token and log-prob of each row."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.values.tolist()
        return [int(token) for token in tokens], logprobs


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes to capture: close together where a row costs much of a step, and up to ``most``."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


class DeviceDecode:
    """Launches decode steps of at most ``max_rows`` rows; ``eager`` never captures (``--eager-decode``).

    Attributes:
        launches: steps so far.
        replays: those of them that came from a graph.
    """

    def __init__(self, model: CausalLM, cache: PagedCache, max_rows: int, *, eager: bool = False) -> None:
        self.model, self.cache, self.max_rows = model, cache, max_rows
        self.launches = self.replays = 0
        device = model.device
        self._captures = device.type == "cuda" and not eager
        self._buckets = bucket_sizes(max_rows)
        rows = round_up(max_rows, ROW_STEP)
        self._step = torch.zeros(rows, 5, dtype=torch.long, device=device)
        self._temperatures = torch.ones(rows, device=device)
        self._greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self._last = torch.zeros(rows, dtype=torch.long, device=device)
        self._output = torch.zeros(2, rows, dtype=torch.float64, device=device)
        self._params: list[SamplingParams] = []
        self._graphs = GraphSet(device)
        self._epoch = self._version = self._addresses = -1

    def release(self) -> None:
        """Give the memory of all graphs back."""
        self._graphs.clear()

    def launch(self, rows: Seq[StepRow], version: int = 0) -> StepResult:
        """Start a step over the first rows of the block table; returns before its result is there.

        Where ``version`` of the weights has changed, it is checked whether they were allocated anew.
        """
        size = self._bucket(len(rows))
        self.cache.reserve(self.max_rows if self._captures else size, max(row.position for row in rows) + 1)
        open_cells(self.cache, [row.position for row in rows])
        self._upload(rows, size)
        self.launches += 1
        graph = self._graph(size, version)
        if graph is None:
            columns = round_up(max(row.position for row in rows) + 1, READ_STEP)
            self._program(size, min(columns, self.cache.columns))
        else:
            graph.replay()
            self.replays += 1
        return self._result(len(rows))

    def _bucket(self, rows: int) -> int:
        if rows > self.max_rows:
            raise EngineError(f"a decode step of {rows} rows was asked for, room is for {self.max_rows}")
        if not self._captures:
            return round_up(rows, ROW_STEP)
        return next(size for size in self._buckets if size >= rows)

    def _upload(self, rows: Seq[StepRow], size: int) -> None:
        rows = [*rows, *[PAUSED] * (size - len(rows))]
        columns = [(r.source, r.token, r.position, r.counter, as_int64(r.seed)) for r in rows]
        self._step[:size].copy_(torch.tensor(columns), non_blocking=True)
        params = [row.sampling for row in rows]
        if params != self._params:
            temperatures = torch.tensor([1.0 if p.greedy else p.temperature for p in params])
            self._temperatures[:size].copy_(temperatures, non_blocking=True)
            self._greedy[:size].copy_(torch.tensor([p.greedy for p in params]), non_blocking=True)
            self._params = params

    def _program(self, size: int, columns: int) -> None:
        """The step itself: reads and writes static buffers only."""
        step = self._step[:size].unbind(1)
        source = step[_SOURCE]
        tokens = torch.where(source >= 0, self._last[source.clamp(min=0)], step[_GIVEN])
        plan = PagedDecodePlan(self.cache, step[_POSITION], columns)
        logits = self.model.logits(self.model.body(tokens, plan.position_ids, plan))
        u = random_bits(step[_SEED], step[_COUNTER]).double() * 2.0**-53
        tokens, logprobs = plain_draw(logits, self._temperatures[:size], self._greedy[:size], u)
        self._last[:size] = tokens
        self._output[0, :size] = tokens
        self._output[1, :size] = logprobs

    def _result(self, rows: int) -> StepResult:
        if self._output.device.type == "cpu":
            return StepResult(self._output[:, :rows].clone())
        values = torch.empty(2, rows, dtype=torch.float64, pin_memory=True)
        values.copy_(self._output[:, :rows], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return StepResult(values, event)

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _graph(self, size: int, version: int) -> torch.cuda.CUDAGraph | None:
        if not self._captures:
            return None
        if (self.cache.epoch, version) != (self._epoch, self._version):
            # Graphs hold addresses: drop them when the cache or the weights have new ones.
            addresses = hash(tuple(p.data_ptr() for p in self.model.module.parameters()))
            if self.cache.epoch != self._epoch or addresses != self._addresses:
                self._graphs.clear()
            self._epoch, self._version, self._addresses = self.cache.epoch, version, addresses
        for wanted in (self._buckets[-1], size):  # the largest first, see GraphSet.capture
            if wanted not in self._graphs and not self._capture(wanted):
                return None
        return self._graphs[size]

    def _capture(self, size: int) -> bool:
        """Record the program for a batch size over rows of padding; where that fails, decoding stays eager from now on."""
        kept = self._step.clone(), self._last.clone()
        self._step[:, _POSITION] = -1
        try:
            if not self._backend().fixed_shape:
                raise CaptureError("attention is computed by no kernel that takes block tables")
            if reason := why_not_captured(self.model.config, self.model.dtype):
                raise CaptureError(reason)
            self._graphs.capture(size, lambda: self._program(size, self.cache.columns))
        except CaptureError as error:
            logger.warning("decoding runs without CUDA graphs, because %s", error)
            self._captures = False
            self._graphs.clear()
            return False
        finally:
            self._step.copy_(kept[0])
            self._last.copy_(kept[1])
        self._epoch = self.cache.epoch  # a capture may have made a layer's pool
        return True

    def _backend(self) -> Backend:
        if self.model.config._attn_implementation == IMPLEMENTATIONS["native"]:
            return GATHER
        return best_backend(self.model.device, self.model.dtype, self.cache.page_size)
