"""What a loss receives from each kind of model for a packed batch, beside the batch's own data."""

from typing import Literal

import torch
from torch import Tensor

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.value_model import ValueModel
from areno.engine.train.batch import PackedBatch

ModelKind = Literal["policy", "value", "reward"]


def predict(
    model: PackedModel, kind: ModelKind, batch: PackedBatch, hidden: Tensor, entropy: bool, bounds: bool
) -> Tensor:
    """What the loss is given of hidden states [T, C]; entries outside the mask are 0.

    Log-probs of the taken actions [A] of a policy, values before each action [A] of a critic, scores [sequences] at the last
    tokens of a reward model. A policy also adds to the data ``packed_entropy`` with ``entropy``, ``packed_min_logits`` and
    ``packed_max_logits`` with ``bounds``.
    """
    if kind == "reward":
        assert isinstance(model, ValueModel)
        return model.values(hidden.index_select(0, last_tokens(batch.plan.starts, hidden.device)))
    rows = hidden.index_select(0, batch.sources)
    if isinstance(model, ValueModel):
        return batch.on_action_axis(model.values(rows))
    assert isinstance(model, CausalLM)
    logprobs, spread, extremes = model.logprobs_and_entropy(rows, batch.targets, batch.temperatures, entropy, bounds)
    if entropy:
        batch.data["packed_entropy"] = batch.on_action_axis(spread)
    if bounds:
        least, greatest = extremes.unbind(-1)
        batch.data["packed_min_logits"] = batch.on_action_axis(least)
        batch.data["packed_max_logits"] = batch.on_action_axis(greatest)
    return batch.on_action_axis(logprobs)


def last_tokens(starts: list[int], device: torch.device) -> Tensor:
    """Packed position of each sequence's last token, from the borders of all sequences."""
    return torch.tensor(starts[1:], device=device) - 1
