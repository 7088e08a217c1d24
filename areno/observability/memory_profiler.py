"""CUDA memory snapshots: every allocation of selected steps, with its stack trace.

    {logs}/memory_snapshots/step_{n}/r{rank}.pickle     open with https://docs.pytorch.org/memory_viz

Only the CUDA allocator records this history, so profiling on a CPU is an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areno.errors import UsageError


class MemoryProfiler:
    """Records selected steps (from 0), each with at most ``max_entries`` events.

    Raises UsageError if a step is selected and there is no CUDA device.
    """

    def __init__(
        self, logs: str | Path, profile_steps: Sequence[int], max_entries: int = 100_000, rank: int = 0
    ) -> None:
        self._logs = Path(logs)
        self._steps = frozenset(profile_steps)
        self._max_entries = max_entries
        self._rank = rank
        if not self._steps:
            return
        import torch

        if not torch.cuda.is_available():
            raise UsageError(
                f"memory_profiler.profile_steps={sorted(self._steps)} requires a CUDA device; on the CPU, remove the "
                "memory_profiler section"
            )

    @contextmanager
    def step(self, global_step: int) -> Iterator[None]:
        """Record the block's memory if the step is selected, even if the block raises (for example, out of memory)."""
        if global_step not in self._steps:
            yield
            return
        from torch.cuda import memory

        memory._record_memory_history(max_entries=self._max_entries)
        try:
            yield
        finally:
            path = self._logs / "memory_snapshots" / f"step_{global_step}" / f"r{self._rank}.pickle"
            path.parent.mkdir(parents=True, exist_ok=True)
            memory._dump_snapshot(str(path))
            memory._record_memory_history(enabled=None)
