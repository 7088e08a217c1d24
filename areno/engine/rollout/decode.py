"""One decode step: eager, or through a compiled step. Both take the same batch and give the same draw."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.compiled.package import StepPackage
from areno.engine.rollout.counter_rng import uniforms
from areno.engine.rollout.kv_cache import ROW_STEP, DecodePlan, SlotCache
from areno.engine.rollout.rows import Rows
from areno.engine.rollout.sampler import Draw
from areno.engine.rollout.scheduler import round_up
from areno.engine.rollout.threads import ThreadRule


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The next token of the sequences in the first slots.

    Attributes:
        tokens: what each is fed.
        positions: its position.
        counters: index of the token to come, see :mod:`counter_rng`.
        columns: cache columns that hold all of them; a multiple of what attention reads.
        rows: how each is sampled, and what they share.
    """

    tokens: list[int]
    positions: list[int]
    counters: Seq[int]
    columns: int
    rows: Rows

    @property
    def padded(self) -> int:
        """Rows of the call, padding included; the cache must have as many slots."""
        return round_up(len(self.tokens), ROW_STEP)


class Decoder(Protocol):
    """Runs decode steps over a cache."""

    def run(self, batch: DecodeBatch) -> Draw:
        """Feed every row its token, and sample the next."""
        ...


class EagerDecode:
    """Operation by operation, as PyTorch does it.

    Args:
        model: the policy.
        cache: its KV cache.
        threads: how many threads a call is worth.
    """

    def __init__(self, model: CausalLM, cache: SlotCache, threads: ThreadRule) -> None:
        self.model, self.cache, self.threads = model, cache, threads

    def run(self, batch: DecodeBatch) -> Draw:
        """See :class:`Decoder`."""
        live = len(batch.tokens)
        padding = [0] * (batch.padded - live)
        tokens, positions = (self._upload(values + padding) for values in (batch.tokens, batch.positions))
        plan = DecodePlan.of(self.cache, positions, batch.columns, live)
        self.threads.apply(batch.padded)
        hidden = self.model.body(tokens, positions, plan)
        return batch.rows.table.draw(self.model.logits(hidden[:live]), batch.counters)

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.model.device)


class CompiledDecode:
    """Through compiled code; what it does not sample itself is sampled from its logits.

    Args:
        package: the step.
        cache: its KV cache.
        threads: how many threads a call is worth.
    """

    def __init__(self, package: StepPackage, cache: SlotCache, threads: ThreadRule) -> None:
        self.package, self.cache, self.threads = package, cache, threads
        self._columns = torch.arange(0)

    def run(self, batch: DecodeBatch) -> Draw:
        """See :class:`Decoder`."""
        live, rows, table = len(batch.tokens), batch.padded, batch.rows.table
        padding = rows - live
        if len(self._columns) < batch.columns:
            self._columns = torch.arange(2 * batch.columns)
        u = torch.zeros(rows, dtype=torch.float64)
        u[:live] = torch.from_numpy(uniforms(table.seeds, batch.counters))
        self.threads.apply(rows)
        logits, tokens, logprobs = self.package(
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
