"""Scoring fixed token rows with any role: log-probs, values, rewards. Nothing here keeps a gradient."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.value_model import ValueModel
from areno.engine.progress import PROGRESS
from areno.engine.train.outputs import last_tokens

# Most tokens of one scoring forward pass, whatever the number of rows.
MAX_TOKENS = 16384

TokenRows = Sequence[Sequence[int]]
Scored = Literal["logprobs", "values", "rewards"]


def temperature_per_row(rows: TokenRows, temperatures: float | Sequence[float]) -> list[float]:
    """One temperature for each row. Raises ValueError: there are several, but not as many as rows."""
    each = [float(temperatures)] * len(rows) if isinstance(temperatures, int | float) else list(temperatures)
    if len(each) != len(rows):
        raise ValueError(f"{len(rows)} rows need one temperature or {len(rows)}, got {len(each)}")
    return each


@torch.no_grad()
def score(model: PackedModel, what: Scored, rows: TokenRows, micro_bs: int, temperatures: Sequence[float]) -> list[Any]:
    """Score rows with a policy (log-probs), or a critic or reward model (values and rewards).

    Returns:
        ``logprobs``: per row that of each token given the tokens before it, under the row's temperature; entry 0 is 0.0.
        ``values``: per row the value after each token. ``rewards``: one score per row, read at its last token.
    """
    results: list[Any] = []
    for batch in _micro_batches(rows, micro_bs):
        PROGRESS.tick()
        CPU_THREADS.apply()
        warmth = temperatures[len(results) : len(results) + len(batch)]
        results += _score_batch(model, what, batch, warmth)
    return results


def _score_batch(model: PackedModel, what: Scored, rows: TokenRows, temperatures: Sequence[float]) -> list[Any]:
    plan = PackedPlan([len(row) for row in rows], model.device)
    tokens = torch.tensor([token for row in rows for token in row], device=model.device)
    hidden = model.body(tokens, plan.position_ids, plan)
    if isinstance(model, ValueModel):
        if what == "rewards":
            return model.values(hidden.index_select(0, last_tokens(plan.starts, hidden.device))).tolist()
        values = model.values(hidden).tolist()
        return [values[start:end] for start, end in pairwise(plan.starts)]
    assert isinstance(model, CausalLM)
    scales = torch.repeat_interleave(torch.tensor(temperatures), torch.tensor(plan.lengths)).to(tokens.device)
    logprobs = model.logprobs(hidden, torch.roll(tokens, -1), scales).tolist()
    return [[0.0, *logprobs[start : end - 1]] for start, end in pairwise(plan.starts)]


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
