"""Find the routers of an MoE model, and make the routers record or replay expert choices."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from areno.config.paths import base_of
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.routing import ChoiceRecorder, Choosing, Routers, current_routing
from areno.errors import UnsupportedModelError, UsageError

OPTION = "rollout.return_routed_experts (--return-routed-experts)"
_PROBE_TOKENS = 3

AllGather = Callable[[Any], list[Any]]
"""Gathers a value from each pipeline stage, in the order of the stages."""


def follow_routers(model: PackedModel, name: str, all_gather: AllGather) -> None:
    """Enable recording and replay of a model's expert choices; see :mod:`areno.engine.model.routing`.

    All ranks must call this function. Raises UsageError: the model has no routers. Raises UnsupportedModelError: the choices of
    the routers cannot be recorded.
    """
    mixtures = dict(_mixtures(model.module))
    names = sorted((name for stage in all_gather(list(mixtures)) for name in stage), key=_layer_order)
    if not names:
        raise UsageError(_no_routers(name))
    shapes = all_gather(_shapes(model, mixtures, name))
    distinct = {shape for stage in shapes for shape in stage}
    if len(distinct) != 1:
        raise UnsupportedModelError(
            f"{OPTION} is not supported for {name}: its routers differ in the number of experts, or in the number of experts "
            "per token; remove the option"
        )
    model.routers = Routers(len(names), *distinct.pop())
    for number, mixture in enumerate(names):
        if mixture in mixtures:
            _follow(mixtures[mixture], model.routers, number)


def refuse_without_experts(path: str, trust_remote_code: bool = False) -> None:
    """Raise UsageError if the configuration of the checkpoint ``path`` contains no experts. No weights are read."""
    config: Any = AutoConfig.from_pretrained(base_of(path), trust_remote_code=trust_remote_code)
    if "experts" not in " ".join(_names(config.get_text_config().to_dict())):
        raise UsageError(_no_routers(path))


def _names(values: dict[Any, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield str(name)
        if isinstance(value, dict):
            yield from _names(value)


def _no_routers(name: str) -> str:
    return f"{OPTION}: {name} is not a mixture-of-experts model, so there is no routing to return; remove the option"


def _mixtures(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if any(_is_experts(part) for part in child.children()):
            yield name, child


def _is_experts(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _layer_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", name)]


def _follow(mixture: nn.Module, routers: Routers, number: int) -> None:
    forward = mixture.forward

    @functools.wraps(forward)
    def routed(*args: Any, **kwargs: Any) -> Any:
        routing = current_routing()
        if routing is None:
            return forward(*args, **kwargs)
        with Choosing(routers, routing, number):
            return forward(*args, **kwargs)

    mixture.forward = routed


class _Probe(ChoiceRecorder):
    """Finds the ``topk`` call with which an MoE layer selects experts.

    The layer passes the ids of the selected experts to its child module whose class name ends in ``Experts``. The probe
    looks for the ``topk`` call that returned the same ids.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._indices: Tensor | None = None

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the expert indices that the experts' module receives. This method is a forward pre-hook of the module."""
        indices = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point()]
        self._indices = indices[0] if indices else self._indices  # shared experts get no indices

    def shape(self) -> tuple[int, int]:
        """Return the number of experts and the number of experts per token."""
        calls = [call for call in self.calls if self._indices is None or _same(call[1], self._indices)]
        if not calls or (self._indices is None and len(self.calls) > 1):
            raise UnsupportedModelError(
                f"{OPTION}: areno cannot identify the topk call with which the routers of {self._name} select experts; remove "
                "the option"
            )
        experts, indices = calls[-1]
        return experts, indices.shape[-1]


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool((left == right).all())


@torch.no_grad()
def _shapes(model: PackedModel, mixtures: dict[str, nn.Module], name: str) -> set[tuple[int, int]]:
    """Return the distinct pairs (number of experts, number of experts per token) of the MoE layers."""
    probes = [_Probe(name) for _ in mixtures]
    with ExitStack() as held:
        held.enter_context(model.gathered())
        for probe, mixture in zip(probes, mixtures.values(), strict=True):
            held.enter_context(_watched(mixture, probe))
        plan = PackedPlan([_PROBE_TOKENS], model.device)
        model.body(_probe_tokens(model), plan.position_ids, plan)
    return {probe.shape() for probe in probes}


def _probe_tokens(model: PackedModel) -> Tensor:
    if model.stage is None or model.stage.first:
        return torch.arange(_PROBE_TOKENS, device=model.device) % model.vocab_size
    width = int(model.config.get_text_config().hidden_size)
    states = torch.randn(_PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0))
    return states.to(model.device, model.dtype)


def _watched(mixture: nn.Module, probe: _Probe) -> ExitStack:
    """Return a context manager in which a probe records the passes of an MoE layer."""
    stack, forward = ExitStack(), mixture.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with probe:
            return forward(*args, **kwargs)

    overridden = "forward" in vars(mixture)
    mixture.forward = run
    stack.callback(lambda: setattr(mixture, "forward", forward) if overridden else delattr(mixture, "forward"))
    for child in mixture.children():
        if _is_experts(child):
            hook = child.register_forward_pre_hook(probe.note, with_kwargs=True)
            stack.callback(hook.remove)
    return stack
