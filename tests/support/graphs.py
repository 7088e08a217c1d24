"""CUDA graphs without a GPU: what a capture forbids is an error, and a replay repeats operations on the same memory.

A captured program is a list of operations with their tensors. Replaying runs them again on those tensors, so whatever the
program took from the host (a number, a new tensor) keeps its value from the capture, as on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique"}


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in _READS:
            raise RuntimeError(f"called a synchronizing CUDA operation: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Records every operation and the tensors that it creates, which stay in the pool of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, dict[int, torch.Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **kwargs)
        made = {
            index: x
            for index, x in enumerate(tree_leaves(result))
            if isinstance(x, torch.Tensor) and _storage(x) not in inputs
        }
        self.operations.append((func, args, kwargs, made))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Stream:
    """A stream with a number; 0 is the main one."""

    def __init__(self, device: Any = None, number: int | None = None) -> None:
        FakeCuda.streams += number is None
        self.number = FakeCuda.streams if number is None else number

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class FakeCuda:
    """Replaces the parts of ``torch.cuda`` that areno uses for captures.

    Args:
        monkeypatch: the fixture of the test.

    Attributes:
        pools: use count by pool; capturing into one that no graph uses any more is an error, as before PyTorch's fix.
        current: current stream of the thread.
        fail: error that the next captures raise.
    """

    streams = 0

    def __init__(self, monkeypatch: Any) -> None:
        FakeCuda.streams = 0
        self.main = Stream(number=0)
        self.current: Stream = self.main
        self.pools: dict[int, int] = {}
        self.replays = 0
        self.fail: Exception | None = None
        self.mode: Any = "default"
        self._guard = _NoHostReads()
        fake = self

        class CUDAGraph:
            def __init__(self) -> None:
                self.operations: list[Any] = []
                self.handle = -1

            def pool(self) -> int:
                return self.handle

            def replay(self) -> None:
                fake.replays += 1
                for func, args, kwargs, made in self.operations:
                    again = tree_leaves(func(*args, **kwargs))
                    for index, tensor in made.items():
                        tensor.copy_(again[index])

            def __del__(self) -> None:
                if self.handle in fake.pools:
                    fake.pools[self.handle] -= 1

        self.patch(monkeypatch, CUDAGraph)

    def patch(self, monkeypatch: Any, graph: type) -> None:
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", Stream)
        monkeypatch.setattr(cuda, "CUDAGraph", graph)
        monkeypatch.setattr(cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(cuda, "set_sync_debug_mode", self.set_mode)
        monkeypatch.setattr(cuda, "stream", self.stream)
        monkeypatch.setattr(cuda, "graph", self.graph)

    def set_mode(self, mode: str) -> None:
        if mode == "error":
            self._guard.__enter__()
        elif self.mode == "error":
            self._guard.__exit__(None, None, None)
        self.mode = mode

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: int | None = None, stream: Stream | None = None, capture_error_mode: str = ""):
        """Leaves the thread on the capture stream when the capture fails, as ``torch.cuda.graph`` does."""
        if pool is not None and self.pools.get(pool, 0) <= 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        before, self.current = self.current, stream or Stream()
        handle = len(self.pools) if pool is None else pool
        recording = _Recording()
        with _NoHostReads(), recording:
            yield
        if self.fail is not None:
            raise self.fail
        self.pools[handle] = self.pools.get(handle, 0) + 1
        graph.handle, graph.operations = handle, recording.operations
        self.current = before
