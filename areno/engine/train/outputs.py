"""Run a model, and compute the predictions that a loss needs.

A policy predicts log-probs, a critic predicts values, and a reward model predicts scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.value_model import ValueModel
from areno.engine.parallel.channels import Channel
from areno.engine.parallel.context import ContextPlan
from areno.engine.train.batch import PackedBatch

ModelKind = Literal["policy", "value", "reward"]


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a packed batch that this rank processes. Without context parallelism, this rank processes all tokens."""

    batch: PackedBatch
    tokens: Tensor  # token ids of this rank [T]
    plan: PackedPlan | ContextPlan
    scored: PackedBatch  # the batch with only the predictions from this rank's positions

    @classmethod
    def of(cls, batch: PackedBatch, context: Channel | None = None) -> Part:
        """Select this rank's tokens of ``batch``.

        With context parallelism, ``context`` connects the ranks that divide the tokens among themselves.
        """
        if context is None or context.size == 1:
            return cls(batch, batch.tokens, batch.plan, batch)
        plan = ContextPlan(batch.plan, context)
        own = plan.within(batch.sources)
        scored = replace(
            batch,
            scored=batch.scored[own],
            sources=batch.sources[own] - plan.first,
            targets=batch.targets[own],
            temperatures=batch.temperatures[own],
        )
        return cls(batch, plan.own(batch.tokens), plan, scored)

    def predicted(self, model: PackedModel, kind: ModelKind, hidden: Tensor, entropy: bool, bounds: bool) -> Tensor:
        """From hidden states [T, C], compute the predictions that the loss needs. :func:`predict` explains the arguments."""
        plan = self.plan if isinstance(self.plan, ContextPlan) else None
        outputs = _outputs(model, kind, self.scored, hidden, entropy, bounds, plan)
        if plan is not None:
            outputs = {name: plan.sum(value) for name, value in outputs.items()}
        predicted = outputs.pop("")
        cast(dict[str, Tensor], self.batch.data).update(outputs)
        return predicted


def predict(
    model: PackedModel,
    kind: ModelKind,
    batch: PackedBatch,
    entropy: bool,
    bounds: bool,
    context: Channel | None = None,
) -> Tensor:
    """Run a model over a batch, and return the predictions for the loss. Predictions outside the response mask are 0.

    A policy returns the log-prob of each action taken [A]. A critic returns the value before each action [A]. A reward
    model returns the score at the last token of each sequence [sequences].

    With ``entropy``, a policy adds ``packed_entropy`` to the data of the batch. With ``bounds``, a policy adds
    ``packed_min_logits`` and ``packed_max_logits``. With context parallelism, ``context`` connects the ranks that divide
    the tokens among themselves.
    """
    part = Part.of(batch, context)
    hidden = model.body(part.tokens, part.plan.position_ids, part.plan)
    return part.predicted(model, kind, hidden, entropy, bounds)


def _outputs(
    model: PackedModel,
    kind: ModelKind,
    batch: PackedBatch,
    hidden: Tensor,
    entropy: bool,
    bounds: bool,
    part: ContextPlan | None = None,
) -> dict[str, Tensor]:
    """From hidden states [T, C], compute the predictions that the loss needs, and other data for the batch.

    In the returned dict, the key "" has the predictions. The caller adds the other entries, such as ``packed_entropy``, to
    ``batch.data``, which the loss reads.
    """
    if kind == "reward":
        assert isinstance(model, ValueModel)
        return {"": _scores(model, last_tokens(batch.plan.starts, hidden.device), hidden, part)}
    rows = hidden.index_select(0, batch.sources)
    if isinstance(model, ValueModel):
        return {"": batch.on_action_axis(model.values(rows))}
    assert isinstance(model, CausalLM)
    logprobs, spread, extremes = model.logprobs_and_entropy(rows, batch.targets, batch.temperatures, entropy, bounds)
    outputs = {"": batch.on_action_axis(logprobs)}
    if entropy:
        outputs["packed_entropy"] = batch.on_action_axis(spread)
    if bounds:
        least, greatest = extremes.unbind(-1)
        outputs |= {
            "packed_min_logits": batch.on_action_axis(least),
            "packed_max_logits": batch.on_action_axis(greatest),
        }
    return outputs


def _scores(model: ValueModel, positions: Tensor, hidden: Tensor, part: ContextPlan | None) -> Tensor:
    if part is None:
        return model.values(hidden.index_select(0, positions))
    own = part.within(positions)
    values = model.values(hidden.index_select(0, positions[own] - part.first))
    return torch.zeros(len(positions), dtype=values.dtype, device=values.device).index_copy(0, own, values)


def last_tokens(starts: list[int], device: torch.device) -> Tensor:
    """Return the packed position of each sequence's last token. The last entry of ``starts`` is the total number of tokens."""
    return torch.tensor(starts[1:], device=device) - 1
