"""Convert between local shards and unsharded tensors.

Sharded parameters are ``DTensor``s. All functions also accept plain tensors, and treat plain tensors as unsharded.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.nn import functional


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of this rank's shard.

    If the backward pass left an unsharded gradient or partial sums, the gradient is redistributed first.
    """
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return local(gradient)


def is_unsharded(tensor: Tensor) -> bool:
    """Whether this rank holds the full tensor."""
    return not isinstance(tensor, DTensor) or all(isinstance(place, Replicate) for place in tensor.placements)


def unsharded(part: Tensor, like: Tensor) -> Tensor:
    """Gather the shards of a tensor from all ranks, and return the full tensor.

    ``part`` is this rank's shard, and ``like`` is a tensor with the same sharding. Every rank of the mesh of ``like`` must call
    this function.
    """
    if not isinstance(like, DTensor):
        return part
    mesh, coordinates = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinates is not None
    splits: list[tuple[int, int, list[Tensor]]] = []  # mesh dimension, tensor dimension, indices of each shard
    shape = list(like.shape)
    for axis, placement in enumerate(like.placements):
        if not isinstance(placement, Replicate):
            dim = placement.dim % like.ndim  # type: ignore[attr-defined]
            splits.append((axis, dim, _split(placement, torch.arange(shape[dim]), dim, mesh.size(axis))))
            shape[dim] = len(splits[-1][2][coordinates[axis]])
    # Not DTensor.full_tensor: PyTorch 2.11 refuses parameters that transformers packs, such as gate and up of experts.
    for axis, dim, indices in reversed(splits):
        part = _joined(part, dim, indices, mesh.get_group(axis))
    return part


def _split(placement: Placement, indices: Tensor, dim: int, count: int) -> list[Tensor]:
    """Divide ``indices`` of dimension ``dim`` among ``count`` shards, and return the indices that each shard holds."""
    row = indices.view([1] * dim + [-1])
    shards, _ = placement._split_tensor(row, count, with_padding=False, contiguous=False)  # type: ignore[attr-defined]
    return [shard.flatten() for shard in shards]


def _joined(part: Tensor, dim: int, indices: list[Tensor], group: ProcessGroup) -> Tensor:
    """Gather all shards along ``dim``. ``indices[i]`` holds the positions of shard i along ``dim`` of the full tensor."""
    longest = max(map(len, indices))
    padding = [0, 0] * (part.ndim - dim - 1) + [0, longest - part.shape[dim]]
    padded = functional.pad(part, padding).contiguous()
    shards = [torch.empty_like(padded) for _ in indices]
    all_gather(shards, padded, group)
    joined = torch.cat([shard.narrow(dim, 0, len(index)) for shard, index in zip(shards, indices, strict=True)], dim)
    order = torch.cat(indices)
    if torch.equal(order, torch.arange(len(order))):
        return joined
    return joined.index_select(dim, order.argsort().to(joined.device))


def shard_of(full: Tensor, like: Tensor) -> Tensor:
    """Shard an unsharded tensor in the same way as ``like``, and return this rank's shard."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def positions(tensor: Tensor) -> tuple[Tensor, ...]:
    """For each dimension of the unsharded tensor, return the indices of the entries that this rank's shard holds."""
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(indices)
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for placement, size, rank in zip(tensor.placements, tensor.device_mesh.shape, coordinates, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        indices[dim] = _split(placement, indices[dim], dim, size)[rank]
    return tuple(indices)


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the first rank of the tensor's mesh that holds this rank's shard."""
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    pairs = zip(tensor.placements, coordinates, strict=True)
    return all(rank == 0 for placement, rank in pairs if isinstance(placement, Replicate))
