"""A tensor as this rank's part, and as a whole.

Parameters that are cut or sharded are ``DTensor``s. Everything here also takes plain tensors, which every rank holds whole.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The gradient of this rank's part, also where backward has left that of the whole, or a sum still to be taken."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return local(gradient)


def is_unsharded(tensor: Tensor) -> bool:
    """Whether each rank of the replica holds all of it."""
    return not isinstance(tensor, DTensor) or all(isinstance(place, Replicate) for place in tensor.placements)


def unsharded(part: Tensor, like: Tensor) -> Tensor:
    """Put the parts of a tensor together that is spread as ``like`` is; every rank of the replica must call."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold, spread as ``like`` is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def positions(tensor: Tensor) -> tuple[Tensor, ...]:
    """For each dimension, the indices in the whole tensor [entries] of what this rank's part holds."""
    found = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(found)
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for placement, size, rank in zip(tensor.placements, tensor.device_mesh.shape, coordinates, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        index = found[dim].view([1] * dim + [-1])
        pieces, _ = placement._split_tensor(index, size, with_padding=False, contiguous=False)  # type: ignore[attr-defined]
        found[dim] = pieces[rank].flatten()
    return tuple(found)


def is_first_copy(tensor: Tensor) -> bool:
    """Whether no rank before this one, in the mesh that a tensor is spread over, holds the same part of it."""
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    pairs = zip(tensor.placements, coordinates, strict=True)
    return all(rank == 0 for placement, rank in pairs if isinstance(placement, Replicate))
