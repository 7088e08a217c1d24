"""What a loss receives from each kind of model for a packed batch, beside the batch's own data."""

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
    """What this rank computes of a packed batch: all of it, or some of its tokens where ranks divide them."""

    batch: PackedBatch
    tokens: Tensor  # [T] of this rank
    plan: PackedPlan | ContextPlan
    scored: PackedBatch  # the batch with only the predictions that this rank makes, from its own positions

    @classmethod
    def of(cls, batch: PackedBatch, context: Channel | None = None) -> Part:
        """This rank's; ``context`` divides the tokens."""
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
        """What the loss is given, from hidden states [T, C]; see :func:`predict`."""
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
    """What the loss is given of a batch; entries outside the mask are 0.

    Log-probs of the taken actions [A] of a policy, values before each action [A] of a critic, scores [sequences] at the last
    tokens of a reward model. A policy also adds to the data ``packed_entropy`` with ``entropy``, ``packed_min_logits`` and
    ``packed_max_logits`` with ``bounds``. With ``context`` each rank of it computes a part of the tokens.
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
    """What is predicted from hidden states [T, C], under no name, and further entries of the data by theirs."""
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
    """Scores [sequences] at some packed positions; 0 at those of other ranks."""
    if part is None:
        return model.values(hidden.index_select(0, positions))
    own = part.within(positions)
    values = model.values(hidden.index_select(0, positions[own] - part.first))
    return torch.zeros(len(positions), dtype=values.dtype, device=values.device).index_copy(0, own, values)


def last_tokens(starts: list[int], device: torch.device) -> Tensor:
    """Packed position of each sequence's last token, from the borders of all sequences."""
    return torch.tensor(starts[1:], device=device) - 1
