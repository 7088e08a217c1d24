"""Pipeline stages: models that hold only some of their layers.

A stage is an instance of the model's class. The instance has only the stage's layers, so ``transformers`` reads only the
weights of these layers. Identity modules replace the layers of other stages. The first stage has the embedding. The last stage
has the final norm and the output layer. If the embedding is tied to the output layer, the last stage also has the embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from areno.engine.parallel.layout import Layout
from areno.errors import UnsupportedModelError


class Absent(nn.Module):
    """Identity module that replaces a module that is on another stage."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        settings = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        self.__dict__.update(settings | {"training": layer.training})  # the body may read the attention type

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden


class StageLayers:
    """The model chunks of a pipeline stage. Each chunk is a range of consecutive layers.

    Args:
        layout: how the ranks divide the model.
        stage: index of the stage.
        layers: number of layers of the full model.

    Raises:
        ValueError: the model has fewer layers than model chunks.
    """

    def __init__(self, layout: Layout, stage: int, layers: int) -> None:
        runs = layout.runs_of_layers(layers)
        self.last_run = len(runs) - 1
        self.first, self.last = stage == 0, stage == layout.pp_size - 1
        self.tied = False  # whether embedding and output layer share weights; set when the stage is created
        self.runs = {index: runs[index] for index in range(stage, len(runs), layout.pp_size)}

    def held(self) -> set[int]:
        """Return the indices of all layers of the stage."""
        return {layer for run in self.runs.values() for layer in run}

    def tied_names(self, module: Any) -> set[str]:
        """Return the parameter names of an embedding that is tied to the output layer.

        The first and the last stage each have a copy of this weight. On other stages, and without tied weights, the result is
        empty.
        """
        if not self.tied or not (self.first or self.last):
            return set()
        weight = getattr(module, module.base_model_prefix).get_input_embeddings().weight
        return {name for name, parameter in module.named_parameters() if parameter is weight}

    def body_of(self, body: nn.Module, run: int | None) -> nn.Module:
        """Return the body with only the layers of one model chunk. For the last chunk, the body also has the norm.

        ``run`` is the index of the chunk. If ``run`` is None, the body has neither layers nor norm.
        """
        layers = self.runs[run] if run is not None else ()
        partial = copy.copy(body)
        partial._modules = dict(body._modules)
        list_name, norm_name = parts_of_body(body)
        partial._modules[list_name] = _only(cast(nn.ModuleList, body._modules[list_name]), layers)
        if run != self.last_run:
            norm = body._modules[norm_name]
            partial._modules[norm_name] = norm if isinstance(norm, Absent) else Absent(cast(nn.Module, norm))
        return partial


def _only(layers: nn.ModuleList, kept: Collection[int]) -> nn.ModuleList:
    return nn.ModuleList(
        layer if index in kept or isinstance(layer, Absent) else Absent(layer) for index, layer in enumerate(layers)
    )


def parts_of_body(body: nn.Module) -> tuple[str, str]:
    """Return the attribute names of a body's layer list and final norm.

    Besides its embedding, a body must have exactly one layer list, and exactly one other module with weights: the norm.

    Raises UnsupportedModelError: the body does not meet this condition.
    """
    embedding = body.get_input_embeddings()  # type: ignore[operator]
    lists = [
        name
        for name, child in body.named_children()
        if isinstance(child, nn.ModuleList)
        and all(isinstance(layer, GradientCheckpointingLayer | Absent) for layer in child)
    ]
    others = [
        name
        for name, child in body.named_children()
        if name not in lists
        and child is not embedding
        and (isinstance(child, Absent) or next(child.parameters(), None) is not None)
    ]
    if len(lists) != 1 or len(others) != 1:
        raise UnsupportedModelError(
            f"{type(body).__name__} cannot be split into pipeline stages: besides its embedding, it must have exactly one list "
            f"of layers and one norm, but it has these modules: {', '.join([*lists, *others]) or 'none'}; use a layout "
            "without pipeline parallelism (such as d2 instead of p2)"
        )
    return lists[0], others[0]


def stage_class(kind: type[nn.Module], layers: StageLayers) -> type[nn.Module]:
    """Return a subclass of ``kind`` that has the same name, but only a stage's layers."""

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        keep_stage(self, layers)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__, "__doc__": kind.__doc__})


def model_body(module: Any) -> Any:
    """Return the body of a ``transformers`` model. Raises UnsupportedModelError if ``base_model_prefix`` is wrong."""
    body = getattr(module, module.base_model_prefix, None)
    if body is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no attribute {module.base_model_prefix!r}, although its base_model_prefix "
            "names this attribute; this architecture is not supported"
        )
    return body


def keep_stage(module: Any, layers: StageLayers) -> None:
    """Replace the modules that are on other stages with :class:`Absent`."""
    body = model_body(module)
    list_name, norm_name = parts_of_body(body)
    body._modules[list_name] = _only(body._modules[list_name], layers.held())
    embedding, head = body.get_input_embeddings(), module.get_output_embeddings()
    layers.tied = head is not None and bool(module.config.get_text_config().tie_word_embeddings)
    if not (layers.first or (layers.tied and layers.last)):
        name = next(name for name, child in body._modules.items() if child is embedding)
        body._modules[name] = Absent(embedding)
    if layers.last:
        return
    body._modules[norm_name] = Absent(body._modules[norm_name])
    for name in [name for name, child in module._modules.items() if child is not body]:
        module._modules[name] = Absent(module._modules[name])
    module.all_tied_weights_keys = {}  # only the last stage holds both tied layers


@torch.no_grad()
def refuse_changed_input(module: Any, layers: StageLayers, name: str, plan: Any) -> None:
    """Raise UnsupportedModelError if the body of ``module`` changes its input before the first layer.

    Every pipeline stage would repeat this change.
    """
    body = layers.body_of(getattr(module, module.base_model_prefix), None)
    width = int(module.config.get_text_config().hidden_size)
    like = next(module.parameters())
    hidden = torch.randn(plan.tokens, width, generator=torch.Generator().manual_seed(0)).to(like)
    out = body(inputs_embeds=hidden[None], position_ids=plan.position_ids[None], use_cache=False, areno=plan)
    if not torch.equal(out.last_hidden_state[0], hidden):
        raise UnsupportedModelError(
            f"{name}: {type(module).__name__} changes its input before the first layer, and every pipeline stage would "
            "repeat this change; use a layout without pipeline parallelism (such as d2 instead of p2)"
        )
