"""Snapshots of a GPU's memory: every allocation of a chosen step, with the code that made it.

    {logs}/memory_snapshots/step_{n}/r{rank}.pickle     opened by https://docs.pytorch.org/memory_viz

It is CUDA's allocator that keeps this history; a CPU's keeps none, so that asking for it there is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areno.errors import UsageError


class MemoryProfiler:
    """Snapshots of chosen steps (from 0), each of at most ``max_entries`` events. Raises UsageError: no CUDA device."""

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
                f"memory_profiler.profile_steps={sorted(self._steps)} needs a CUDA device, and there is none: the CPU's "
                "allocator keeps no history of allocations; leave memory_profiler out"
            )

    @contextmanager
    def step(self, global_step: int) -> Iterator[None]:
        """Record the block's memory where its step was asked for; what fails is told too, out of memory above all."""
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
