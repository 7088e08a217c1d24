"""Compute log-probs, values or rewards of token rows, without gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.heartbeat import HEARTBEAT
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.value_model import ValueModel
from areno.engine.parallel.pipeline import Pipeline
from areno.engine.train.outputs import last_tokens
from areno.engine.train.replay import replay_of
from areno.types.routing import RoutingRecord

# Maximum tokens per scoring forward pass of several rows.
MAX_TOKENS = 16384

TokenRows = Sequence[Sequence[int]]
Scored = Literal["logprobs", "values", "rewards"]


def temperature_per_row(rows: TokenRows, temperatures: float | Sequence[float]) -> list[float]:
    """Return one temperature per row. Raises ValueError: ``temperatures`` is a list, but does not have one entry per row."""
    per_row = [float(temperatures)] * len(rows) if isinstance(temperatures, int | float) else list(temperatures)
    if len(per_row) != len(rows):
        raise ValueError(
            f"temperatures must be one number, or a list with one number for each of {len(rows)} rows; got a list of length "
            f"{len(per_row)}"
        )
    return per_row


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: TokenRows
    temperatures: Sequence[float]  # one per row
    tokens: Tensor  # [T], rows concatenated
    plan: PackedPlan


@torch.no_grad()
def score(
    model: PackedModel,
    what: Scored,
    rows: TokenRows,
    micro_bs: int,
    temperatures: Sequence[float],
    pipeline: Pipeline | None = None,
    routed: Sequence[RoutingRecord | None] | None = None,
) -> list[Any]:
    """Score rows with a policy (log-probs), a critic (values) or a reward model (rewards).

    ``routed`` holds the recorded expert choices of each row, which are replayed if the model is prepared for routing replay.

    Returns:
        ``logprobs``: for each row, the log-prob of each token given the previous tokens, at the row's temperature. The first
            token's entry is 0.0.
        ``values``: for each row, the value after each token.
        ``rewards``: for each row, the score at the last token.

        Only the last stage of a ``pipeline`` returns scores. The other stages return an empty list.
    """
    results: list[Any] = []
    batches = _batches(model, rows, micro_bs, temperatures, routed)
    if pipeline is not None:
        all_batches = list(batches)

        def finish(index: int, hidden: Tensor) -> None:
            results.extend(_scores(model, what, all_batches[index], hidden))

        pipeline.run(all_batches, finish, backward=False)
        return results
    for batch in batches:
        HEARTBEAT.tick()
        CPU_THREADS.apply()
        results += _scores(model, what, batch, model.body(batch.tokens, batch.plan.position_ids, batch.plan))
    return results


def _batches(
    model: PackedModel,
    rows: TokenRows,
    micro_bs: int,
    temperatures: Sequence[float],
    routed: Sequence[RoutingRecord | None] | None,
) -> Iterator[_Batch]:
    done = 0
    for micro in _micro_batches(rows, micro_bs):
        plan = PackedPlan([len(row) for row in micro], model.device)
        if model.routers is not None and routed is not None:
            plan.routing = replay_of(routed[done : done + len(micro)], plan.lengths, model.routers, model.device)
        tokens = torch.tensor([token for row in micro for token in row], device=model.device)
        yield _Batch(micro, temperatures[done : done + len(micro)], tokens, plan)
        done += len(micro)


def _scores(model: PackedModel, what: Scored, batch: _Batch, hidden: Tensor) -> list[Any]:
    """Return the scores of a batch's rows, computed from the batch's hidden states [T, C]."""
    plan = batch.plan
    if isinstance(model, ValueModel):
        if what == "rewards":
            return model.values(hidden.index_select(0, last_tokens(plan.starts, hidden.device))).tolist()
        values = model.values(hidden).tolist()
        return [values[start:end] for start, end in pairwise(plan.starts)]
    assert isinstance(model, CausalLM)
    scales = torch.repeat_interleave(torch.tensor(batch.temperatures), torch.tensor(plan.lengths)).to(hidden.device)
    logprobs = model.logprobs(hidden, torch.roll(batch.tokens, -1), scales).tolist()
    return [[0.0, *logprobs[start : end - 1]] for start, end in pairwise(plan.starts)]


def _micro_batches(rows: TokenRows, micro_bs: int) -> Iterator[TokenRows]:
    """Split rows, in order, into batches of at most ``micro_bs`` rows and ``MAX_TOKENS`` tokens.

    A row of more than ``MAX_TOKENS`` tokens is a batch of its own.
    """
    batch: list[Sequence[int]] = []
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {index} is empty and cannot be scored; remove empty rows")
        if batch and (len(batch) == micro_bs or sum(map(len, batch)) + len(row) > MAX_TOKENS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
