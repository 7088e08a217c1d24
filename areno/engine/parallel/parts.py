"""Convert between local shards and unsharded tensors.

Sharded parameters are ``DTensor``s. All functions also take plain tensors, which are unsharded.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of this rank's shard, even if backward has left it unsharded or as partial sums."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return local(gradient)


def is_unsharded(tensor: Tensor) -> bool:
    """Whether each rank of the replica holds the full tensor."""
    return not isinstance(tensor, DTensor) or all(isinstance(place, Replicate) for place in tensor.placements)


def unsharded(part: Tensor, like: Tensor) -> Tensor:
    """Gather the shards of a tensor sharded like ``like``; every rank of that tensor's mesh must call it."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def shard_of(full: Tensor, like: Tensor) -> Tensor:
    """Shard an unsharded tensor like ``like``, and return this rank's shard."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def positions(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return, for each dimension, the indices [entries] that this rank's shard has in the unsharded tensor."""
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(indices)
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for placement, size, rank in zip(tensor.placements, tensor.device_mesh.shape, coordinates, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        index = indices[dim].view([1] * dim + [-1])
        pieces, _ = placement._split_tensor(index, size, with_padding=False, contiguous=False)  # type: ignore[attr-defined]
        indices[dim] = pieces[rank].flatten()
    return tuple(indices)


def is_first_copy(tensor: Tensor) -> bool:
    """Whether no earlier rank of the tensor's mesh holds the same shard as this one."""
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    pairs = zip(tensor.placements, coordinates, strict=True)
    return all(rank == 0 for placement, rank in pairs if isinstance(placement, Replicate))
