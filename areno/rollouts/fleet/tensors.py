"""The weights of an engine as named full tensors, independent of the parallel layout.

The receiver of the weights specifies the names, dtypes and shapes of the tensors. A tied weight has one name. If the receiver
has an adapter, only the adapter is transferred. If only the sender has an adapter, the merged weights are transferred. Values
are rounded to the receiver's dtype.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from areno.engine.engine import Engine
from areno.engine.parallel.parts import local, shard_of, unsharded
from areno.errors import EngineError, UsageError

_ADAPTER = (".lora_", ".modules_to_save.")
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to transfer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return the byte offset of each tensor in one common buffer, and the size of the buffer in bytes."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // _ALIGN) * _ALIGN
    return offsets, max(end, _ALIGN)


def views(memory: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yield the tensors in a buffer (uint8 [n]), at the offsets of :func:`layout`."""
    for offset, spec in zip(layout(specs)[0], specs, strict=True):
        yield memory[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)


def rollout_specs(engine: Engine) -> list[TensorSpec]:
    """Return the specs of the tensors that a rollout engine needs in a weight update, in module order."""
    model = engine.actor.model
    return [
        TensorSpec(name, p.dtype, tuple(p.shape))
        for name, p in model.module.named_parameters()
        if model.adapter is None or any(mark in name for mark in _ADAPTER)
    ]


def refuse_misfit(engine: Engine, specs: Sequence[TensorSpec]) -> None:
    """Raise a UsageError on every rank if the trainer's tensors do not fit ``specs``.

    The tensors do not fit if a tensor is missing or has another shape, or if the trainer's adapter cannot be merged exactly.
    """
    model = engine.actor.model
    trainer_shapes = shapes(engine)
    for spec in specs:
        shape = trainer_shapes.get(spec.name, trainer_shapes.get(_base_name(spec.name)))
        if shape is None:
            raise UsageError(
                f"the trainer of {engine.path} has no tensor {spec.name}, which the rollout replicas need; load the "
                "trainer and the replicas with the same checkpoint and adapter"
            )
        if shape != spec.shape:
            raise UsageError(
                f"the weights of {engine.path} do not fit the rollout replicas: {spec.name} has the shape {shape} in the "
                f"trainer and {spec.shape} in the replicas; load the trainer and the replicas from the same checkpoint"
            )
        if spec.name not in trainer_shapes and model.adapter is not None and not model.adapter.merges:
            raise UsageError(
                "the rollout replicas have no adapter, so they need merged weights, but the trainer's adapter cannot be merged "
                "exactly. Exact merging requires plain LoRA, and a trainer on CPU with fp32 weights. To load the adapter in "
                "the replicas, give the fleet an EngineConfig with the trainer's adapter"
            )


def whole_tensors(engine: Engine, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield the full tensors of a trainer one at a time, in the dtypes of ``specs``. Call this function only while the
    trainer generates no answers.

    Ranks gather each tensor from shards. Every rank with a shard of the model must therefore consume all tensors in the order
    of ``specs``. The first rank receives the tensors of all pipeline stages. Any other rank gets empty tensors for all stages
    except its own.
    """
    peers, model = engine.config.peers, engine.actor.model
    own = dict(model.module.named_parameters())
    owners = {
        name: stage
        for stage, names in reversed(list(enumerate(peers.pipeline.all_gather(list(own)))))
        for name in names
    }
    for spec in specs:
        layer, _, last = spec.name.rpartition(".")
        stored = spec.name if spec.name in owners else _base_name(spec.name)
        owner, full = owners[stored], torch.empty(0)
        if owner == peers.place.stage:
            like = own[stored]
            part: Tensor = like
            if spec.name not in own and last == "weight" and model.adapter is not None:
                adapted: Any = model.module.get_submodule(layer)
                part = model.adapter.sum_of(adapted)
            full = unsharded(local(part.detach()), like).to(spec.dtype)
        if owner > 0 and peers.heads and peers.place.stage in (0, owner):
            full = peers.pipeline.send_to_first(full, owner, spec.shape, spec.dtype)
        yield spec, full


def shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a trainer's tensors on all pipeline stages, by name. All ranks must call this function."""
    own = {name: tuple(p.shape) for name, p in engine.actor.model.module.named_parameters()}
    return {name: shape for each in engine.config.peers.pipeline.all_gather(own) for name, shape in each.items()}


def _base_name(name: str) -> str:
    """Return the name of a tensor after an adapter has wrapped its layer: ``q.base_layer.weight`` for ``q.weight``."""
    layer, _, last = name.rpartition(".")
    return f"{layer}.base_layer.{last}"


def install(engine: Engine, tensors: Mapping[str, Tensor], *, check: bool) -> None:
    """Copy full tensors by name into the parameters of a paused rollout engine. Each rank copies its shard.

    With ``check``, the parameters are then compared with the tensors bit by bit. Raises EngineError if they differ.
    """
    parameters = dict(engine.actor.model.module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            part, target = shard_of(tensor, parameters[name]), local(parameters[name])
            target.copy_(part)
            if check and not torch.equal(raw(target), raw(part.to(target.device, target.dtype))):
                raise EngineError(
                    f"the installed weights {name} differ from the sent weights; check the memory of this machine for errors"
                )


def raw(tensor: Tensor) -> Tensor:
    """View a tensor as a one-dimensional uint8 tensor of its bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """Return a checksum of a tensor's dtype, shape and bytes."""
    checksum = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    checksum.update(raw(tensor).cpu().numpy().data)
    return checksum.hexdigest()
