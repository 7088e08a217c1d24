"""Run one decode step. The results of the three variants (eager, with areno's kernels, compiled) differ only in rounding."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.compiled.package import StepPackage
from areno.engine.rollout.compiled.traced import DecodeStep
from areno.engine.rollout.counter_rng import uniforms
from areno.engine.rollout.sampler import Draw, SamplingTable
from areno.engine.rollout.scheduler import round_up
from areno.engine.rollout.sequence import Prefill, Sequence
from areno.engine.rollout.slot_cache import READ_STEP, ROW_STEP, DecodePlan, SlotCache


class SharedPrefixes:
    """For each row, the leader (the first row with the same prefix), and the length of the shared prefix.

    Rows with the same :class:`Prefill` object share a prefix. Rows without such an object share no prefix. The KV cache holds
    one copy of the prefix per row. Attention may therefore read any of these copies, and a row that leaves the batch does not
    affect the other rows.
    """

    def __init__(self, prefills: Seq[Prefill | None]) -> None:
        first: dict[Prefill, int] = {}
        self.leaders = [row if p is None else first.setdefault(p, row) for row, p in enumerate(prefills)]
        self.lengths = [0 if p is None else p.length for p in prefills]
        self._padded: tuple[Tensor, Tensor] | None = None

    def padded(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return two int64 tensors [rows]: the leader of each row, and the length of each row's shared prefix.

        The leader of a row is the index of the first row with the same prefix. Padding rows share no prefix: each is its own
        leader, and its prefix length is 0.
        """
        if self._padded is None or len(self._padded[0]) != rows:
            more = range(len(self.leaders), rows)
            self._padded = torch.tensor([*self.leaders, *more]), torch.tensor([*self.lengths, *(0 for _ in more)])
        return self._padded


class RowParameters:
    """Sampling parameters and shared prefixes of the running samples.

    Decode steps reuse this object until a sample joins or leaves the batch.
    """

    def __init__(self, sequences: Seq[Sequence], device: torch.device) -> None:
        self.table = sampling_table(sequences, device)
        self.prefixes = SharedPrefixes([s.prefill for s in sequences])


def sampling_table(sequences: Seq[Sequence], device: torch.device) -> SamplingTable:
    """Return a table with the sampling parameters of samples, one row per sample."""
    return SamplingTable(
        [s.group.sampling for s in sequences], [s.seed for s in sequences], device, [s.edits for s in sequences]
    )


class DecodeBatch:
    """Inputs of a decode step. Sequence i of ``sequences`` must be in slot i of the KV cache.

    ``counters`` holds the number of output tokens of each sequence, from which :mod:`counter_rng` computes the next random
    number. ``columns`` is the number of cache columns to attend to: the longest context, rounded up to a multiple of
    :data:`READ_STEP`.
    """

    def __init__(self, sequences: Seq[Sequence], rows: RowParameters) -> None:
        lengths = [s.length for s in sequences]
        self.tokens = [s.last_token for s in sequences]
        self.positions = [length - 1 for length in lengths]
        self.counters = [len(s.output) for s in sequences]
        self.columns = round_up(max(lengths), READ_STEP)
        self.rows = rows
        self.padded = round_up(len(lengths), ROW_STEP)  # row count with padding, at most the cache's slots


class EagerDecode:
    """Runs decode steps eagerly.

    ``plan`` is a function that creates the attention plan of a step, such as :meth:`DecodePlan.of`. Its arguments are the KV
    cache, the position of each row's new token, and the number of cache columns to attend to.
    """

    def __init__(self, model: CausalLM, cache: Any, plan: Callable[[Any, list[int], int], Any] = DecodePlan.of) -> None:
        self.model, self.cache, self._plan = model, cache, plan

    def run(self, batch: DecodeBatch) -> Draw:
        """Feed every row's last token to the model, and sample the row's next token."""
        live = len(batch.tokens)
        plan = self._plan(self.cache, batch.positions, batch.columns)
        tokens = torch.tensor(batch.tokens + [0] * (batch.padded - live), device=self.model.device)
        hidden = self.model.body(tokens, plan.position_ids, plan)
        return batch.rows.table.draw(self.model.logits(hidden[:live]), batch.counters)


class StepDecode:
    """Runs a compiled or uncompiled :class:`DecodeStep` on the slots of the KV cache.

    If all rows of the batch are plain (see :attr:`SamplingTable.plain`), the step itself samples the tokens. Otherwise, the
    tokens of all rows are sampled afterwards from the step's logits.
    """

    def __init__(self, step: StepPackage | DecodeStep, cache: SlotCache) -> None:
        self.step, self.cache = step, cache
        self._columns = torch.arange(0)

    def run(self, batch: DecodeBatch) -> Draw:
        """See :meth:`EagerDecode.run`."""
        live, rows, table = len(batch.tokens), batch.padded, batch.rows.table
        padding = rows - live
        if len(self._columns) < batch.columns:
            self._columns = torch.arange(2 * batch.columns)
        u = torch.zeros(rows, dtype=torch.float64)
        u[:live] = torch.from_numpy(uniforms(table.seeds, batch.counters))
        logits, tokens, logprobs = self.step(
            torch.tensor(batch.tokens + [0] * padding),
            torch.tensor(batch.positions + [0] * padding),
            torch.tensor(batch.positions + [self.cache.columns - 1] * padding),
            self._columns[: batch.columns],
            *batch.rows.prefixes.padded(rows),
            *table.padded(rows),
            u,
            *self.cache.leading(rows),
        )
        if table.plain:
            return Draw(tokens[:live], logprobs[:live], None)
        return table.draw(logits[:live], batch.counters)
