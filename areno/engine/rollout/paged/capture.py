"""CUDA graphs of one program at several batch sizes: one memory pool, recorded on one stream beside the main one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from areno.errors import EngineError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class CaptureError(EngineError):
    """A program cannot be captured; the message says why."""


class GraphSet(dict[int, torch.cuda.CUDAGraph]):
    """Captured graphs by batch size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def clear(self) -> None:
        """Drop all graphs, and their pool: older PyTorch aborts a capture into a pool that no graph uses any more."""
        super().clear()
        self._pool = None

    def capture(self, size: int, program: Callable[[], None]) -> None:
        """Record a program. All graphs share one pool, so capture the largest first: the others then fit into its memory.

        Raises:
            CaptureError: it cannot be captured. The calling thread is then on the stream that it was on before, as it is
                after an EngineError of the program.
        """
        main = torch.cuda.current_stream(self._device)
        try:
            self[size] = self._record(main, program)
        except Exception as error:  # Triton's errors have no common base class
            # torch.cuda.graph stays on the capture stream when ending the capture fails. Work there would not be ordered
            # with the weight updates on the main stream.
            torch.cuda.set_stream(main)
            torch.cuda.synchronize(self._device)
            if isinstance(error, EngineError):
                raise
            lines = str(error).splitlines() or [""]
            raise CaptureError(f"capturing failed: {type(error).__name__}: {lines[0]}") from error

    def _record(self, main: Any, program: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Two runs beside the main stream (lazy allocations, kernel compilation; no host sync), then the capture."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # each stream keeps a cuBLAS workspace, so there is one
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
    """Waiting for the device raises in the block, with a message that names the operation; in a capture it would not."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def why_not_captured(config: Any, dtype: torch.dtype) -> str | None:
    """What keeps the steps of a model out of CUDA graphs, as far as its configuration shows it."""
    experts = max(getattr(config.get_text_config(), name, None) or 0 for name in _EXPERTS)
    if experts > 1 and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"PyTorch's grouped matrix product of a mixture of experts waits for the host in {name}; use --dtype bfloat16"
    return None
