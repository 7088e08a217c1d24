"""Measure the time and memory of a few training steps in a layout, for ``areno plan --fit --try``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.plan import trial
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import OptimizerOptions
from areno.loss_fns import sft_loss_fn
from areno.types import TrainSequence

_LONGEST = 2048  # maximum tokens of a row


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """Settings of a trial. All rows have the same length, and the second half of each row is the response.

    ``meter`` reads a byte counter, such as the number of bytes that a network interface has sent. The trial reads the counter
    before and after each measured step, and reports the increase.
    """

    path: str
    tokens: int  # per microbatch
    microbatches: int  # per step, over all replicas
    device: torch.device
    dtype: torch.dtype
    optimizer: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(lr=1e-5))
    steps: int = 2  # number of measured steps, after a warmup step
    longest: int = _LONGEST  # less if the model's context is shorter
    meter: Callable[[], int] = lambda: 0

    @property
    def rows_per_pass(self) -> int:
        """Number of rows per microbatch."""
        return -(-self.tokens // self.longest)

    def rows(self, vocabulary: int) -> list[TrainSequence]:
        """Return the rows of one training step, with random tokens."""
        generator, count = torch.Generator().manual_seed(0), self.rows_per_pass * self.microbatches
        length = self.tokens // self.rows_per_pass
        tokens = torch.randint(vocabulary, (count, length), generator=generator).tolist()
        prompt = [True] * (length // 2) + [False] * (length - length // 2)
        return [TrainSequence(prompt, one, [0.0] * length, [0.0] * length) for one in tokens]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a trial: medians over the measured steps, and the peak memory of the rank with the highest peak."""

    seconds: float
    counted: int  # bytes that ``meter`` counted
    held: int  # bytes


def measure_layout(layout: Layout, trial_run: LayoutTrial) -> Measured:
    """Train a few steps in a layout, with one process per rank. Raises the errors of :class:`EngineGroup`."""
    config = EngineConfig(
        device=trial_run.device,
        dtype=trial_run.dtype,
        optimizer=trial_run.optimizer,
        activation_checkpointing=True,
        kv_cache_tokens=1024,
        decode="eager",
    )
    group = EngineGroup(trial_run.path, config, layout)
    try:
        trial_run = replace(trial_run, longest=min(trial_run.longest, group.context_length or trial_run.longest))
        rows = trial_run.rows(group.vocab_size)
        passes = MicroBatching(max_tokens_per_mb=trial_run.rows_per_pass * len(rows[0].tokens))
        group.train(rows, sft_loss_fn, passes)
        group.run_on_all_ranks(trial.begin)
        seconds, counted = [], []
        for _ in range(trial_run.steps):
            before, began = trial_run.meter(), time.perf_counter()
            group.train(rows, sft_loss_fn, passes)
            seconds.append(time.perf_counter() - began)
            counted.append(trial_run.meter() - before)
        return Measured(median(seconds), int(median(counted)), max(group.run_on_all_ranks(trial.peak)))
    finally:
        group.close()
