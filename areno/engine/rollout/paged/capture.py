"""Capture one function as CUDA graphs for several batch sizes, with one memory pool and one capture stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from areno.errors import EngineError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class CaptureError(EngineError):
    """A function cannot be captured as a CUDA graph."""


class GraphSet(dict[int, torch.cuda.CUDAGraph]):
    """The captured CUDA graphs by batch size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def clear(self) -> None:
        """Free all graphs and the memory pool.

        The next capture uses a new pool, because in older versions of PyTorch, a capture fails if all graphs of its pool have
        been freed.
        """
        super().clear()
        self._pool = None

    def capture(self, size: int, program: Callable[[], None]) -> None:
        """Capture ``program`` as the CUDA graph for the batch size ``size``.

        All graphs share a memory pool. Capture the largest graph first, so that smaller graphs can reuse the largest graph's
        memory.

        Raises:
            CaptureError: the program cannot be captured. The calling thread's current stream stays the same.
        """
        main = torch.cuda.current_stream(self._device)
        try:
            self[size] = self._record(main, program)
        except Exception as error:  # Triton's errors have no common base class
            # torch.cuda.graph leaves the capture stream current if ending the capture fails. Work on that stream would not be
            # ordered with weight updates on the main stream.
            torch.cuda.set_stream(main)
            torch.cuda.synchronize(self._device)
            if isinstance(error, EngineError):
                raise
            lines = str(error).splitlines() or [""]
            raise CaptureError(f"capturing failed: {type(error).__name__}: {lines[0]}") from error

    def _record(self, main: Any, program: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``program`` to compile kernels, run it again to find synchronizations with the host, and then capture it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # only one, as each stream keeps a cuBLAS workspace
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            program()
            with _no_syncs():
                program()
        main.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            program()
        self._pool = graph.pool()
        return graph


@contextmanager
def _no_syncs() -> Iterator[None]:
    """Raise an error that names the operation if an operation synchronizes with the host.

    An error during the capture of a CUDA graph would not name the operation.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def why_not_captured(config: Any, dtype: torch.dtype) -> str | None:
    """Return why a CUDA graph cannot capture decode steps of a model with this configuration; None if no reason is known."""
    experts = max(getattr(config.get_text_config(), name, None) or 0 for name in _EXPERTS)
    if experts > 1 and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return (
            f"PyTorch's grouped matmul for mixture-of-experts models synchronizes with the host if the dtype is {name}; "
            "use --dtype bfloat16"
        )
    return None
