"""Shard a model across the ranks of a replica, and save a sharded model as unsharded files.

The model's ``transformers`` tensor-parallel plan states how each layer is sharded. Sharded parameters are ``DTensor``s, and
unsharded parameters are plain tensors.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig

from areno.config.machine import HEADS, heads_problem, tensor_parallel_problem
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.stages import Absent
from areno.engine.model.token_logprobs import VocabularyShare
from areno.engine.parallel.channels import RankGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.parts import local, unsharded
from areno.engine.parallel.rank_context import RankContext
from areno.errors import UnsupportedModelError

# Plan styles with which an output head gathers the ranks' logits.
_GATHERS = ("colwise_gather_output", "colwise_rep")
# A style that all-reduces the accumulated gradient after every backward pass: wrong from the second microbatch on.
_SUMS_GRADIENT = "replicated_with_grad_allreduce"


class _Mesh(DistributedConfig):
    """A sharding configuration that adds an FSDP axis to the mesh. FSDP itself is applied later, to the complete model."""

    dp_size = 1


def distributed_config(
    config: PretrainedConfig, head_plan: dict[str, str], layout: Layout, option: str, path: str
) -> DistributedConfig:
    """Return the ``transformers`` configuration for sharding a model.

    The tensor-parallel plan of a model may add hooks that sum the gradients of some unsharded parameters. The returned
    configuration has no such hooks. Instead, the optimizer sums these gradients once per step; :func:`partial_names` lists the
    parameters. A plan may also gather the logits. In the returned configuration, the logits stay sharded; see
    :func:`vocabulary_share`.

    Args:
        config: model configuration.
        head_plan: tensor-parallel plan that the model's class declares for its output head, such as ``lm_head``.
        layout: how the ranks divide the model.
        option: name of the option that sets the checkpoint ``path``, for error messages.

    Raises:
        UnsupportedModelError: the architecture has no tensor-parallel plan, the ranks cannot divide the model's attention
            heads, or ``transformers`` is too old.
    """
    text: Any = config.get_text_config()
    tp_size = layout.tp_size
    if problem_and_remedy := tensor_parallel_problem(layout.fsdp):
        raise UnsupportedModelError(f"{option} {path}: {problem_and_remedy}, or use --tp-size 1")
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModelError(
            f"{option} {path}: transformers has no tensor-parallel plan for {type(text).__name__}; use --tp-size 1 "
            "(--world-size N then trains on N devices that each hold the whole model)"
        )
    if problem := heads_problem({name: getattr(text, name, None) for name in HEADS}, tp_size, path):
        raise UnsupportedModelError(problem)
    changed = {f"model.{name}": "replicate" for name in _summed(plan)}
    changed |= {name: "colwise" for name, style in head_plan.items() if style in _GATHERS}
    if not layout.fsdp:
        return DistributedConfig(tp_size=tp_size, tp_plan=changed or "auto")
    return _Mesh(tp_size=tp_size, fsdp_size=layout.shards, tp_plan=changed or "auto")


def vocabulary_share(module: Any) -> VocabularyShare | None:
    """Return the slice of the vocabulary that this rank's output head computes; None if the head is unsharded."""
    head = module.get_output_embeddings()
    name = next((name for name, child in module.named_modules() if child is head), "")
    if head is None or isinstance(head, Absent) or style_of(module, name) != "colwise":
        return None
    weight: DTensor = head.weight
    channel = RankGroup(weight.device_mesh.get_group(), weight.device)
    longest = -(-len(weight) // channel.size)
    return VocabularyShare(channel.rank * longest, len(weight.to_local()), longest, len(weight), channel)


def _summed(plan: dict[str, str]) -> list[str]:
    return [name for name, style in plan.items() if style == _SUMS_GRADIENT]


def partial_names(config: PretrainedConfig, names: list[str]) -> set[str]:
    """Return the names of unsharded parameters for which each rank computes only a part of the gradient.

    Such parameters are, for example, the norms of attention heads.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    endings = [tuple(name.split(".")) for name in _summed(plan)]

    def fits(name: str) -> bool:
        module = name.split(".")[:-1]
        return any(
            len(module) >= len(ending)
            and all(want in ("*", have) for want, have in zip(ending, module[-len(ending) :], strict=True))
            for ending in endings
        )

    return {name for name in names if fits(name)}


def style_of(module: Any, name: str) -> str | None:
    """Return the style that the tensor-parallel plan gives a layer of a module; None if the layer is unsharded."""
    return module.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))  # type: ignore[no-any-return]


def save_unsharded(model: PackedModel, folder: str | Path, peers: RankContext) -> None:
    """Write a model in Hugging Face format. The shards are gathered one tensor at a time.

    Every rank that holds a shard must call this function.
    """
    weights: dict[str, Tensor] = {}
    kept: dict[int, Tensor] = {}  # tied weights are written once
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in model.state().items():
        if id(tensor) in kept:
            tied[name] = first_names[id(tensor)]
            continue
        full = unsharded(local(tensor.detach()), tensor)
        rounded = isinstance(tensor, nn.Parameter) and full.is_floating_point()
        kept[id(tensor)] = full.to("cpu", model.dtype if rounded else full.dtype) if peers.heads else torch.empty(0)
        weights[name], first_names[id(tensor)] = kept[id(tensor)], name
    weights = peers.pipeline.gather_to_first(weights if peers.heads else {})
    tied = {name: other for each in peers.pipeline.all_gather(tied) for name, other in each.items()}
    if peers.first:
        weights |= {name: weights[other] for name, other in tied.items()}
        module: Any = model.module
        saved, module.config.distributed_config = getattr(module.config, "distributed_config", None), None
        try:
            module.save_pretrained(folder, state_dict=weights)
            module.config.dtype = model.dtype  # save_pretrained has written the shards' dtype
            module.config.save_pretrained(folder)
        finally:
            module.config.distributed_config = saved
