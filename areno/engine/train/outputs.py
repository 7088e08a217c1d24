"""What a loss receives from each kind of model for a packed batch, beside the batch's own data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.value_model import ValueModel
from areno.engine.train.batch import PackedBatch

ModelKind = Literal["policy", "value", "reward"]


def policy_outputs(
    model: PackedModel, batch: PackedBatch, hidden: Tensor, entropy: bool, bounds: bool = False
) -> Tensor:
    """Log-probs of the taken actions [A], 0 outside the mask; adds to the data what else is wanted of the logits.

    ``packed_entropy`` with ``entropy``, ``packed_min_logits`` and ``packed_max_logits`` with ``bounds``.
    """
    assert isinstance(model, CausalLM)
    rows = hidden.index_select(0, batch.sources)
    logprobs, spread, extremes = model.logprobs_and_entropy(rows, batch.targets, batch.temperatures, entropy, bounds)
    if entropy:
        batch.data["packed_entropy"] = batch.on_action_axis(spread)
    if bounds:
        least, greatest = extremes.unbind(-1)
        batch.data["packed_min_logits"] = batch.on_action_axis(least)
        batch.data["packed_max_logits"] = batch.on_action_axis(greatest)
    return batch.on_action_axis(logprobs)


def value_outputs(
    model: PackedModel, batch: PackedBatch, hidden: Tensor, entropy: bool, bounds: bool = False
) -> Tensor:
    """Values before each action [A], 0 outside the mask."""
    assert isinstance(model, ValueModel)
    return batch.on_action_axis(model.values(hidden.index_select(0, batch.sources)))


def reward_outputs(
    model: PackedModel, batch: PackedBatch, hidden: Tensor, entropy: bool, bounds: bool = False
) -> Tensor:
    """Score of each sequence [sequences], read at its last token."""
    assert isinstance(model, ValueModel)
    assert isinstance(batch.plan, PackedPlan), "scores of sequences are not trained on trees"
    return model.values(hidden.index_select(0, last_tokens(batch.plan.starts, hidden.device)))


def last_tokens(starts: list[int], device: torch.device) -> Tensor:
    """Packed position of each sequence's last token, from the borders of all sequences."""
    return torch.tensor(starts[1:], device=device) - 1


OUTPUTS: dict[ModelKind, Callable[[PackedModel, PackedBatch, Tensor, bool, bool], Tensor]] = {
    "policy": policy_outputs,
    "value": value_outputs,
    "reward": reward_outputs,
}
