"""A tensor as this rank's part, and as a whole.

Parameters that are cut or sharded are ``DTensor``s. Everything here also takes plain tensors, which every rank holds whole.
"""

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


def is_whole(tensor: Tensor) -> bool:
    """Whether each rank of the replica holds all of it."""
    return not isinstance(tensor, DTensor) or all(isinstance(place, Replicate) for place in tensor.placements)


def whole_of(part: Tensor, like: Tensor) -> Tensor:
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
