"""Estimate the memory of each rank in a training layout, and the bytes that each rank sends per optimizer step.

The estimates are computed from a model's parameter counts and dimensions. ``docs/layouts.md`` explains the formulas.
``areno plan --fit`` uses the estimates. They also cover FSDP, which :mod:`areno.engine.plan.memory_plan` does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from areno.engine.parallel.layout import Layout

MASTER = 4  # bytes of a master weight, of an accumulated gradient, and of each fp32 moment
# Layers that FSDP has gathered at once: the current one, and the next one being prefetched.
_GATHERED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Parameter counts and dimensions of a model."""

    layers: int
    layer: int  # weights of a layer, without its experts
    experts: int  # weights of a layer's experts
    root: int  # embedding, last norm and output layer; tied weights counted once
    tied: bool  # whether the embedding is tied to the output layer
    hidden: int
    queries: int  # number of heads times their width
    keys: int  # number of key heads times their width
    width: int  # width of a head
    middle: int  # intermediate size of an MLP, or the sum for the experts of a token
    per_token: int  # experts per token; 0 without MoE layers
    experts_of_layer: int
    vocab: int

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.layers * (self.layer + self.experts) + self.root

    @property
    def active(self) -> int:
        """Number of active parameters per token."""
        share = self.per_token / self.experts_of_layer if self.per_token else 1
        return int(self.layers * (self.layer + share * self.experts)) + self.root

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelSizes:
        """Return the sizes of the model that a configuration describes. The model is created on the meta device."""
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config)
        text: Any = config.get_text_config()
        named = {name: p.numel() for name, p in module.named_parameters()}
        inside = {name: n for name, n in named.items() if ".layers." in name}
        experts = sum(n for name, n in inside.items() if ".experts." in name)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        chosen = int(getattr(text, "num_experts_per_tok", None) or 0) if experts else 0
        middle = int((getattr(text, "moe_intermediate_size", None) if chosen else None) or text.intermediate_size)
        return cls(
            layers=text.num_hidden_layers,
            layer=(sum(inside.values()) - experts) // text.num_hidden_layers,
            experts=experts // text.num_hidden_layers,
            root=sum(named.values()) - sum(inside.values()),
            tied=bool(text.tie_word_embeddings),
            hidden=text.hidden_size,
            queries=text.num_attention_heads * width,
            keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * width,
            width=width,
            middle=middle * max(chosen, 1),
            per_token=chosen,
            experts_of_layer=int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0),
            vocab=text.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Training:
    """Properties of one replica's training step, from which memory, traffic and time are estimated."""

    tokens: int  # per microbatch
    microbatches: int = 1  # per optimizer step
    compute: int = 2  # bytes per element in forward and backward passes
    moments: int = 2 * MASTER  # bytes of both moments per weight
    recomputes: bool = True


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Memory of one rank in bytes, by purpose."""

    weights: int  # including master weights
    moments: int
    gradients: int
    gathered: int  # weights and gradients that are temporarily unsharded
    activations: int

    @property
    def total(self) -> int:
        """The rank's total memory in bytes, which is the sum of all fields."""
        return self.weights + self.moments + self.gradients + self.gathered + self.activations


def rank_bytes(model: ModelSizes, layout: Layout, training: Training) -> RankBytes:
    """Return the peak memory of a training step, for the rank that needs the most memory."""
    return max((_of_stage(model, layout, training, stage) for stage in range(layout.pp_size)), key=lambda b: b.total)


def _of_stage(model: ModelSizes, layout: Layout, training: Training, stage: int) -> RankBytes:
    runs = layout.runs_of_layers(model.layers)
    layers = sum(len(run) for run in runs[stage :: layout.pp_size])
    root = model.root
    if layout.pp_size > 1:  # the first stage has the embedding, the last one the output layer
        root = (root if model.tied else root // 2) if stage in (0, layout.pp_size - 1) else 0
    dense, experts, t = layers * model.layer + root, layers * model.experts, layout.tp_size
    b, kept = training.compute, training.moments
    if not layout.fsdp:
        own = (dense + experts) // t
        alone = layout.world_size == 1 and b == MASTER  # then the weights are the master weights
        masters = 0 if alone else MASTER * own // layout.dp_size
        weights, gradients, gathered = b * own + masters, MASTER * own, 0
        moments = kept * own // layout.dp_size
    else:
        # Expert parallelism does not change the bytes per rank: FSDP shards the experts across fewer ranks.
        own = (dense + experts) // (t * layout.shards)
        weights, gradients, moments = MASTER * own, MASTER * own, kept * own
        layer = (model.layer + model.experts // layout.ep_size) // t
        # Weights, and in backward their unreduced gradients. Embedding and output layer stay gathered for the whole pass.
        gathered = _GATHERED_LAYERS * layer * (b + MASTER) + (root // t) * (b + MASTER)
    activations = _activations(model, layout, training, stage, layers)
    if layout.fsdp and training.microbatches == 1:  # gradients are reduce-scattered while activations are freed
        gradients = max(gradients - gathered - activations, 0)
    return RankBytes(weights, moments, gradients, gathered, activations)


def _activations(model: ModelSizes, layout: Layout, training: Training, stage: int, layers: int) -> int:
    """Return the sum, in bytes, of the saved activations, the activations inside one layer, and one chunk of logits.

    With recomputation, the saved activations are the inputs of the layers.
    """
    tokens, b = -(-training.tokens // layout.cp_size), training.compute
    kept = waiting_passes(layout, stage, training.microbatches) / layout.pp_chunks
    inner = 3 * model.hidden + (2 * model.queries + 2 * model.keys + 3 * model.middle) // layout.tp_size
    waiting = int(kept * layers * tokens * b * (model.hidden if training.recomputes else model.hidden + inner))
    inside = 2 * tokens * b * inner
    chunk = min(tokens, max(2**23 // model.vocab, 1)) if stage == layout.pp_size - 1 else 0
    return waiting + inside + 3 * MASTER * chunk * model.vocab // layout.tp_size


def waiting_passes(layout: Layout, stage: int, microbatches: int) -> int:
    """Return the maximum number of forward passes whose activations a stage must hold at once for later backward passes.

    A stage has ``layout.pp_chunks`` model chunks, each with some of the stage's layers. One pass processes one microbatch with
    one of these chunks.
    """
    stages, chunks = layout.pp_size, layout.pp_chunks
    first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(first + 1, microbatches * chunks)


def sent_bytes(model: ModelSizes, layout: Layout, training: Training) -> dict[str, int]:
    """Return the bytes that a rank sends per optimizer step, by layout axis.

    On the axis ``data``, a rank sends weights and gradients.
    """
    tokens, b, passes = training.tokens // layout.cp_size, training.compute, training.microbatches
    layers, t = model.layers // layout.pp_size, layout.tp_size
    again = 1 if training.recomputes else 0  # recomputation repeats the forward pass
    experts = layers * model.experts // (t * layout.ep_size)
    dense, root = layers * model.layer // t, model.root // (layout.pp_size * t)
    sent: dict[str, float] = {}
    if layout.fsdp:
        gathers = 2 if layout.reshards else 1
        rest, of_experts = _rest(layout.shards), _rest(layout.shards // layout.ep_size)
        sent["data"] = passes * (dense * (gathers * b + MASTER) + root * (b + MASTER)) * rest
        sent["data"] += passes * experts * (gathers * b + MASTER) * of_experts
    else:
        sent["data"] = (MASTER + b) * (dense + experts + root) * _rest(layout.dp_size)
    # An all-reduce over t ranks sends 2 (t - 1) / t of its size; a layer has two in forward and two in backward.
    sent["tensor"] = passes * layers * (4 + 2 * again) * tokens * model.hidden * b * 2 * _rest(t)
    # Key heads are repeated until there is one for each context rank.
    attention = 2 * model.queries + 2 * max(model.keys, layout.cp_size * t * model.width)
    sent["context"] = passes * layers * (2 + again) * tokens * attention // t * b * _rest(layout.cp_size)
    sent["pipeline"] = passes * 2 * layout.pp_chunks * tokens * model.hidden * b * _rest(layout.pp_size)
    if model.tied and layout.pp_size > 1:  # the first and last stages hold the embedding and all-reduce its gradient
        sent["pipeline"] += (
            2 * MASTER * model.vocab * model.hidden // (t * layout.pp_size * (layout.shards if layout.fsdp else 1))
        )
    sent["experts"] = (
        passes * layers * (4 + 2 * again) * tokens * model.per_token * model.hidden * b * _rest(layout.ep_size)
    )
    return {axis: int(count) for axis, count in sent.items() if count}


@dataclass(frozen=True, slots=True)
class Machines:
    """Approximate computing speed and communication bandwidths of one device, and the number of devices per node.

    The speed is in operations per second. The bandwidths are in bytes per second.
    """

    operations: float = 4e14
    node: float = 2e11  # bytes within the node
    network: float = 2e10  # bytes to other nodes
    per_node: int = 8


def seconds(model: ModelSizes, layout: Layout, training: Training, machines: Machines) -> float:
    """Estimate the duration of a training step in seconds.

    The estimate assumes that data-parallel and pipeline-parallel communication overlaps with computation, and that other
    communication does not.
    """
    sent, d = sent_bytes(model, layout, training), layout
    near = d.world_size <= machines.per_node
    inner = d.tp_size * d.cp_size * d.ep_size <= machines.per_node
    waited = sum(sent.get(axis, 0) for axis in ("tensor", "context", "experts"))
    operations = (8 if training.recomputes else 6) * model.active * training.tokens * training.microbatches
    work = operations / (
        machines.operations * d.tp_size * d.cp_size * d.pp_size * (1 - idle_share(d, training.microbatches))
    )
    beside = (sent.get("data", 0) + sent.get("pipeline", 0)) / (machines.node if near else machines.network)
    return max(work, beside) + waited / (machines.node if inner else machines.network)


def _rest(size: int) -> float:
    """Return the fraction of sharded data that one rank does not hold, if ``size`` ranks hold equal shards."""
    return (size - 1) / size


def idle_share(layout: Layout, microbatches: int) -> float:
    """Return the share of a step during which a rank waits in the pipeline (the pipeline bubble)."""
    waits = (layout.pp_size - 1) / layout.pp_chunks
    return waits / (microbatches + waits)


def layouts_of(devices: int, model: ModelSizes, per_node: int = 8) -> Iterator[Layout]:
    """Yield the parallel layouts to consider for training on ``devices`` devices.

    The first layout has one full replica per device. The other layouts combine FSDP with tensor, pipeline, context and expert
    parallelism in all ways that the model allows.
    """
    yield Layout(devices)
    for tensor in _divisors(model.keys // model.width, min(devices, per_node)):
        for stages in _powers(min(devices // tensor, model.layers)):
            for context in _powers(min(devices // (tensor * stages), per_node)):
                data = devices // (tensor * stages * context)
                if data * tensor * stages * context != devices:
                    continue
                groups = math.gcd(model.experts_of_layer, data * context) if model.per_token else 1
                for experts in _divisors(groups, groups):
                    if data * context > 1 or stages * tensor > 1:
                        yield Layout(data, tensor, data * context > 1, context, experts, stages)


def _divisors(number: int, most: int) -> Iterator[int]:
    return (size for size in _powers(most) if number % size == 0)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
