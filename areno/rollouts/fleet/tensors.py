"""The weights of an engine as named whole tensors, whatever the layout of its ranks.

Who receives says what it wants: names, types and shapes. A tied weight has one name. Where the receiver has an adapter,
that is all it wants; where only the sender has one, it sends the sums that its own rollouts would run on. Rounding to the
receiver's type is that of ``Tensor.copy_``, as the optimizer's from its master weights is.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from areno.engine.engine import Engine
from areno.engine.parallel.parts import local, part_of, whole_of
from areno.errors import EngineError, UsageError

_ADAPTER = (".lora_", ".modules_to_save.")
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is to travel."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins in one piece of memory, and how many bytes all take."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // _ALIGN) * _ALIGN
    return offsets, max(end, _ALIGN)


def views(memory: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """The tensors that lie in memory uint8 [n] as :func:`layout` says."""
    for offset, spec in zip(layout(specs)[0], specs, strict=True):
        yield memory[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)


def wanted(engine: Engine) -> list[TensorSpec]:
    """What a rollout engine needs in order to be up to date, in the order of its module."""
    model = engine.actor.model
    return [
        TensorSpec(name, p.dtype, tuple(p.shape))
        for name, p in model.module.named_parameters()
        if model.adapter is None or any(mark in name for mark in _ADAPTER)
    ]


def refuse_misfit(engine: Engine, specs: Sequence[TensorSpec]) -> None:
    """Raise a UsageError, on every rank, where a trainer's tensor is missing, differs in shape, or cannot be made exactly."""
    model = engine.actor.model
    own = shapes(engine)
    for spec in specs:
        held = own.get(spec.name, own.get(_base_name(spec.name)))
        if held is None:
            raise UsageError(
                f"the trainer of {engine.path} has no tensor {spec.name}, which the rollout replicas want; give both the "
                "same checkpoint and the same adapter"
            )
        if held != spec.shape:
            raise UsageError(
                f"the weights of {engine.path} do not fit the rollout replicas: {spec.name} has the shape "
                f"{held} here and {spec.shape} there; load both from the same checkpoint"
            )
        if spec.name not in own and model.adapter is not None and not model.adapter.merges:
            raise UsageError(
                "the rollout replicas have no adapter, and the trainer's cannot be added to its weights exactly (they are "
                "not fp32 on a CPU); give the fleet an EngineConfig with the trainer's adapter"
            )


def whole_tensors(engine: Engine, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """The wanted tensors of a trainer, one at a time, in the wanted types; its generation must be idle.

    Every rank that holds a part of the model must take them all, in this order: those that share a tensor put it together. What
    other stages of a pipeline have comes to the first rank; on other ranks an entry may be empty.
    """
    peers, model = engine.config.peers, engine.actor.model
    own = dict(model.module.named_parameters())
    owners = {
        name: stage for stage, names in reversed(list(enumerate(peers.pipeline.everyone(list(own))))) for name in names
    }
    for spec in specs:
        layer, _, last = spec.name.rpartition(".")
        stored = spec.name if spec.name in owners else _base_name(spec.name)
        owner, whole = owners[stored], torch.empty(0)
        if owner == peers.place.stage:
            like = own[stored]
            part: Tensor = like
            if spec.name not in own and last == "weight" and model.adapter is not None:
                adapted: Any = model.module.get_submodule(layer)
                part = model.adapter.sum_of(adapted)
            whole = whole_of(local(part.detach()), like).to(spec.dtype)
        if owner > 0 and peers.heads and peers.place.stage in (0, owner):
            whole = peers.pipeline.pass_on(whole, owner, spec.shape, spec.dtype)
        yield spec, whole


def shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a trainer's tensors, those of other stages of a pipeline too; all ranks must call."""
    own = {name: tuple(p.shape) for name, p in engine.actor.model.module.named_parameters()}
    return {name: shape for each in engine.config.peers.pipeline.everyone(own) for name, shape in each.items()}


def _base_name(name: str) -> str:
    """What a tensor of a layer is called where the layer has an adapter."""
    layer, _, last = name.rpartition(".")
    return f"{layer}.base_layer.{last}"


def install(engine: Engine, tensors: Mapping[str, Tensor], *, check: bool) -> None:
    """Copy whole tensors by name into the parameters of a rollout engine, whose generation rests; each rank its part.

    With ``check`` the parameters are compared with the tensors afterwards, bit by bit. Raises EngineError: they differ.
    """
    own = dict(engine.actor.model.module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            part, target = part_of(tensor, own[name]), local(own[name])
            target.copy_(part)
            if check and not torch.equal(raw(target), raw(part.to(target.device, target.dtype))):
                raise EngineError(f"{name} is not what was sent after it was installed; the memory may be damaged")


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """A checksum of type, shape and bytes."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    found.update(raw(tensor).cpu().numpy().data)
    return found.hexdigest()
