"""Counts the bytes of the tensors that are alive while a piece of code runs, with or without memory behind them."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GROUPED = torch.ops.aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """The product of a mixture's experts: on fake tensors PyTorch knows its shape in bf16 only."""
    first, second, *rest = args
    made: Tensor = _GROUPED(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **(kwargs or {}))
    return made.to(first.dtype)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors of an operation's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, ValuesView)):
            yield from _tensors(value)


class LiveBytes(TorchDispatchMode):
    """Inside the block, every storage that an operation makes counts from its birth to its death.

    Fake tensors count what they would take. What was there before does not count. ``peak`` is of the block, or since
    :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Tensors from before the block, whose views and in-place results are nothing new."""
        for tensor in tensors:
            self._known[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

    def restart(self) -> None:
        """Begin a new peak with what is alive."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it made."""
        if func is _DEVICE:  # asked for more often than all else together, and makes nothing
            return func(*args)
        given = {id(x.untyped_storage()) for x in _tensors((args, (kwargs or {}).values()))}
        result = _grouped(args, kwargs) if func is _GROUPED else func(*args, **(kwargs or {}))
        for made in _tensors((result,)):
            if id(made.untyped_storage()) not in given:
                self._count(made.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
