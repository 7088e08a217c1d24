"""Scoring fixed token rows with any role: log-probs, values, rewards. Nothing here keeps a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.value_model import ValueModel
from areno.engine.progress import PROGRESS
from areno.engine.train.outputs import last_tokens

# Most tokens of one scoring forward pass, whatever the number of rows.
MAX_TOKENS = 16384

T = TypeVar("T")
TokenRows = Sequence[Sequence[int]]


def temperature_per_row(rows: TokenRows, temperatures: float | Sequence[float]) -> list[float]:
    """One temperature for each row.

    Raises:
        ValueError: there are several, but not as many as rows.
    """
    each = [float(temperatures)] * len(rows) if isinstance(temperatures, int | float) else list(temperatures)
    if len(each) != len(rows):
        raise ValueError(f"{len(rows)} rows need one temperature or {len(rows)}, got {len(each)}")
    return each


def score_logprobs(model: CausalLM, rows: TokenRows, temperatures: Sequence[float], micro_bs: int) -> list[list[float]]:
    """Log-prob of each token of each row given the tokens before it, under the row's temperature; entry 0 is 0.0."""
    warmth = iter(temperatures)

    def one(hidden: Tensor, tokens: Tensor, plan: PackedPlan) -> list[list[float]]:
        spread = [next(warmth) for _ in plan.lengths]
        scales = torch.repeat_interleave(torch.tensor(spread), torch.tensor(plan.lengths)).to(tokens.device)
        values = model.logprobs(hidden, torch.roll(tokens, -1), scales).tolist()
        return [[0.0, *values[start : end - 1]] for start, end in pairwise(plan.starts)]

    return [row for batch in _passes(model, rows, micro_bs, one) for row in batch]


def score_values(model: ValueModel, rows: TokenRows, micro_bs: int) -> list[list[float]]:
    """Value after each token of each row."""

    def one(hidden: Tensor, _: Tensor, plan: PackedPlan) -> list[list[float]]:
        values = model.values(hidden).tolist()
        return [values[start:end] for start, end in pairwise(plan.starts)]

    return [row for batch in _passes(model, rows, micro_bs, one) for row in batch]


def score_rewards(model: ValueModel, rows: TokenRows, micro_bs: int) -> list[float]:
    """Score of each row, read at its last token."""

    def one(hidden: Tensor, _: Tensor, plan: PackedPlan) -> list[float]:
        return model.values(hidden.index_select(0, last_tokens(plan.starts, hidden.device))).tolist()

    return [score for batch in _passes(model, rows, micro_bs, one) for score in batch]


@torch.no_grad()
def _passes(
    model: PackedModel, rows: TokenRows, micro_bs: int, one: Callable[[Tensor, Tensor, PackedPlan], list[T]]
) -> list[list[T]]:
    results = []
    for batch in _micro_batches(rows, micro_bs):
        PROGRESS.tick()
        CPU_THREADS.apply()
        plan = PackedPlan([len(row) for row in batch], model.device)
        tokens = torch.tensor([token for row in batch for token in row], device=model.device)
        results.append(one(model.body(tokens, plan.position_ids, plan), tokens, plan))
    return results


def _micro_batches(rows: TokenRows, micro_bs: int) -> Iterator[TokenRows]:
    """Rows in order, at most ``micro_bs`` of them and ``MAX_TOKENS`` tokens at once; a longer row is alone."""
    batch: list[Sequence[int]] = []
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {index} is empty: a row to score needs at least one token")
        if batch and (len(batch) == micro_bs or sum(map(len, batch)) + len(row) > MAX_TOKENS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
