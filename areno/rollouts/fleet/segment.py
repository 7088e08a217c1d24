"""How the tensors of a weight update lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from areno.rollouts.fleet.tensors import TensorSpec

_ALIGN = 64


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins, and how many bytes all take."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // _ALIGN) * _ALIGN
    return offsets, max(end, _ALIGN)


def view(memory: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor in memory uint8 [n]."""
    return memory[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
