"""Trains in a layout for a few steps, to see how long they take and what a rank holds: ``areno plan --fit --try``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.plan import trial
from areno.engine.train.optimizer import OptimizerConfig
from areno.loss_fns import sft_loss_fn
from areno.types import TrainSequence

_LONGEST = 2048  # tokens of a row; a microbatch of more has several


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """What is trained: rows of equal length, of which the second half is answer. ``meter`` counts bytes, of each step."""

    path: str
    tokens: int  # of a microbatch
    microbatches: int  # of a step, of all replicas
    device: torch.device
    dtype: torch.dtype
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    steps: int = 2  # after the first, which is not measured
    longest: int = _LONGEST
    meter: Callable[[], int] = lambda: 0

    @property
    def rows_per_pass(self) -> int:
        """Rows of a microbatch."""
        return -(-self.tokens // self.longest)

    def rows(self, vocabulary: int) -> list[TrainSequence]:
        """Rows of a step."""
        generator, count = torch.Generator().manual_seed(0), self.rows_per_pass * self.microbatches
        length = self.tokens // self.rows_per_pass
        tokens = torch.randint(vocabulary, (count, length), generator=generator).tolist()
        prompt = [True] * (length // 2) + [False] * (length - length // 2)
        return [TrainSequence(prompt, one, [0.0] * length, [0.0] * length) for one in tokens]


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of the steps, and the peak of the fullest rank."""

    seconds: float
    counted: int  # by the meter
    held: int  # bytes


def measure_layout(layout: Layout, wanted: LayoutTrial) -> Measured:
    """Train in a layout, in processes of its own; see :class:`EngineGroup` for errors."""
    config = EngineConfig(
        device=wanted.device,
        dtype=wanted.dtype,
        optimizer=wanted.optimizer,
        activation_checkpointing=True,
        kv_cache_tokens=1024,
        decode="eager",
    )
    group = EngineGroup(wanted.path, config, layout)
    try:
        rows = wanted.rows(group.vocab_size)
        group.train(rows, sft_loss_fn, wanted.rows_per_pass)
        group.each_rank(trial.begin)
        seconds, counted = [], []
        for _ in range(wanted.steps):
            before, began = wanted.meter(), time.perf_counter()
            group.train(rows, sft_loss_fn, wanted.rows_per_pass)
            seconds.append(time.perf_counter() - began)
            counted.append(wanted.meter() - before)
        return Measured(median(seconds), int(median(counted)), max(group.each_rank(trial.peak)))
    finally:
        group.close()
