"""Count the bytes of live tensors in a ``with`` block, for real and fake tensors."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GROUPED = torch.ops.aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """Run PyTorch's grouped matrix multiplication, which computes the experts of an MoE layer.

    The inputs are converted to bf16, because PyTorch's implementation for fake tensors supports no other dtype.
    """
    first, second, *rest = args
    product: Tensor = _GROUPED(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **(kwargs or {}))
    return product.to(first.dtype)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, ValuesView)):
            yield from _tensors(value)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live tensors that were created inside the ``with`` block.

    ``now`` is the current size in bytes. ``peak`` is the maximum of ``now`` since the last :meth:`restart`, or since the start
    of the block. A fake tensor counts like a real tensor of the same size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Exclude tensors, views of these tensors, and results of in-place operations on these tensors from the count."""
        for tensor in tensors:
            self._storages[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

    def restart(self) -> None:
        """Set ``peak`` to ``now``."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # by far the most frequent operation; creates nothing
            return func(*args)
        inputs = {id(x.untyped_storage()) for x in _tensors((args, (kwargs or {}).values()))}
        result = _grouped(args, kwargs) if func is _GROUPED else func(*args, **(kwargs or {}))
        for output in _tensors((result,)):
            if id(output.untyped_storage()) not in inputs:
                self._count(output.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        reference = self._storages.get(key)
        if reference is not None and reference() is storage:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, freed)
        self.now += size
