"""Takes CUDA memory snapshots of selected steps on each rank. A snapshot contains memory allocations with their stack traces.

The snapshots are saved as ``{logs}/memory_snapshots/step_{n}/r{rank}.pickle``. To view a snapshot, open
https://docs.pytorch.org/memory_viz and load the file.

Only the CUDA allocator records its allocations, so memory profiling on a CPU is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areno.errors import EngineError, UsageError


class MemoryProfiler:
    """Records the memory allocations of selected steps on each rank of the actor's engine.

    Steps are numbered from 0. A snapshot has at most ``max_entries`` events. Raises UsageError if a step is selected, but the
    ranks have no GPU (``gpu`` is False).
    """

    def __init__(
        self, logs: str | Path, profile_steps: Sequence[int], max_entries: int = 100_000, *, gpu: bool = True
    ) -> None:
        self._logs = Path(logs)
        self._steps = frozenset(profile_steps)
        self._max_entries = max_entries
        if self._steps and not gpu:
            raise UsageError(
                f"memory_profiler.profile_steps={sorted(self._steps)} requires a CUDA device, but the run uses "
                "the CPU; remove the memory_profiler section"
            )

    @contextmanager
    def step(self, global_step: int, on_all_ranks: Callable[..., object]) -> Iterator[None]:
        """If the step is selected, record the memory allocations of the ``with`` block, and then write the snapshots.

        Snapshots are also written if the block raises, for example because memory runs out. ``on_all_ranks`` is
        :meth:`Backend.run_on_all_ranks`.
        """
        if global_step not in self._steps:
            yield
            return
        folder = self._logs.absolute() / "memory_snapshots" / f"step_{global_step}"
        on_all_ranks(_record, self._max_entries)
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # ranks that have ended write no snapshot; the block's error matters
                on_all_ranks(_write, folder)
            raise
        on_all_ranks(_write, folder)


def _record(engine: Any, max_entries: int) -> None:
    from torch.cuda import memory

    memory._record_memory_history(max_entries=max_entries)


def _write(engine: Any, folder: Path) -> None:
    from torch.cuda import memory

    folder.mkdir(parents=True, exist_ok=True)
    memory._dump_snapshot(str(folder / f"r{engine.config.peers.rank}.pickle"))
    memory._record_memory_history(enabled=None)
