"""Run decode steps on the device: forward pass, logits and sampling in static buffers, with one CUDA graph per batch size.

A row's input token is either a token from the host, or the previous step's output, which is still on the device. A step can
therefore be launched before the host has read the tokens of the previous step. The other inputs of a row are numbers that the
host knows: the position of the input token, the number of output tokens so far, and the seed. The same code runs eagerly in
three cases: on a CPU, with ``--eager-decode``, and if the step cannot be captured.
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
from areno.engine.rollout.paged.backends import GATHER, AttentionBackend, best_backend
from areno.engine.rollout.paged.capture import CaptureError, GraphSet, why_not_captured
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.paged.plans import PagedDecodePlan, open_cells
from areno.engine.rollout.scheduler import round_up
from areno.engine.rollout.slot_cache import READ_STEP, ROW_STEP
from areno.errors import EngineError
from areno.types import SamplingParams

logger = logging.getLogger(__name__)

# Columns of the step buffer.
_SOURCE, _TOKEN, _POSITION, _COUNTER, _SEED = range(5)


@dataclass(frozen=True, slots=True)
class StepRow:
    """The inputs of one batch row in a decode step."""

    position: int  # position of the token fed; -1 if the row is paused
    counter: int  # index, in the sample's output, of the token to sample
    source: int  # row of the previous step whose token is fed; -1: ``token`` is fed
    token: int  # token to feed, if the host knows it
    seed: int  # seed of the sample
    sampling: SamplingParams  # only temperature and greedy are supported


PAUSED = StepRow(-1, 0, -1, 0, 0, SamplingParams(greedy=True))


@dataclass(slots=True)
class StepResult:
    """The tokens and log-probs of a launched step, while they are copied to the host."""

    values: Tensor
    event: Any = None

    def read(self) -> tuple[list[int], list[float]]:
        """Wait until the step is done. Return the tokens and the log-probs of all rows."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.values.tolist()
        return [int(token) for token in tokens], logprobs


def bucket_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture, up to ``most``.

    Small sizes are closer together, because padding rows are a larger share of a small batch.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


class DeviceDecode:
    """Launches decode steps of at most ``max_rows`` rows. If ``eager`` is true (``--eager-decode``), no CUDA graphs are used.

    Attributes:
        launches: number of launched steps.
        replays: number of launched steps that were replayed from a CUDA graph.
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
        """Free all CUDA graphs."""
        self._graphs.clear()

    def launch(self, rows: Seq[StepRow], version: int = 0) -> StepResult:
        """Launch a step in which ``rows[i]`` uses row i of the block table, and return before the step's result is ready.

        ``version`` is the version of the weights. If ``version`` has changed since the last call, and weights have moved in
        memory, all CUDA graphs are dropped.
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
            raise EngineError(f"a decode step has {rows} rows, but the maximum is {self.max_rows}")
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
        """Run one decode step. All inputs and results are in static buffers, so that a CUDA graph can capture this method."""
        step = self._step[:size].unbind(1)
        source = step[_SOURCE]
        tokens = torch.where(source >= 0, self._last[source.clamp(min=0)], step[_TOKEN])
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
            # Graphs hold addresses: drop them if the cache or the weights have moved.
            addresses = hash(tuple(p.data_ptr() for p in self.model.module.parameters()))
            if self.cache.epoch != self._epoch or addresses != self._addresses:
                self._graphs.clear()
            self._epoch, self._version, self._addresses = self.cache.epoch, version, addresses
        for bucket in (self._buckets[-1], size):  # the largest first, see GraphSet.capture
            if bucket not in self._graphs and not self._capture(bucket):
                return None
        return self._graphs[size]

    def _capture(self, size: int) -> bool:
        """Capture a step of ``size`` rows, all of them padding. If the capture fails, all later steps run eagerly."""
        saved = self._step.clone(), self._last.clone()
        self._step[:, _POSITION] = -1
        try:
            if not self._backend().fixed_shape:
                raise CaptureError(
                    "the launch parameters of the attention backend depend on the context lengths, but a CUDA graph fixes "
                    "these parameters"
                )
            if reason := why_not_captured(self.model.config, self.model.dtype):
                raise CaptureError(reason)
            self._graphs.capture(size, lambda: self._program(size, self.cache.columns))
        except CaptureError as error:
            logger.warning("decoding runs without CUDA graphs, because %s", error)
            self._captures = False
            self._graphs.clear()
            return False
        finally:
            self._step.copy_(saved[0])
            self._last.copy_(saved[1])
        self._epoch = self.cache.epoch  # the capture may have allocated a layer's pool
        return True

    def _backend(self) -> AttentionBackend:
        if self.model.config._attn_implementation == IMPLEMENTATIONS["native"]:
            return GATHER
        return best_backend(self.model.device, self.model.dtype, self.cache.page_size)
