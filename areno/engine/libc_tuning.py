"""What the C libraries below PyTorch should do for a process that generates and trains on CPUs.

*One pool of OpenMP workers at a time.* Every thread that calls into PyTorch gets OpenMP workers of its own, and keeps
them. The rollout loop and the thread that trains would have twice as many as there are cores, and GNU OpenMP then lets all
of them sleep at every barrier: on two cores a decode step took 15 ms where it takes 4. So a thread whose turn is over lets
its workers go; the next parallel region starts them again, which takes well under a millisecond.

*Freed memory is kept.* By default the C library gives large pieces back to the system as they are freed, and takes them again
page by page: training on 64 rows with a 135 M model took 22 s on two cores where it takes 14.6, and 10 million page faults a
step. So large tensors come from an allocator of ours that keeps what they free
(:mod:`areno.engine.kernels.cpu_memory`). Where it cannot be built, the C library keeps it, in one heap that is not trimmed by
itself; freed blocks fit new ones badly there, and the peak is about half as high again. Where little memory is available
elsewhere, what is kept goes back before each pass.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from areno.engine.kernels.cpu_memory import OwnMemory, own_memory

# Options of glibc's mallopt: no pieces apart from the heap, no trimming, and what one thread frees another may use.
_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
_KEPT: list[OwnMemory] = []  # our allocator, once it is used
_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: what the program has set stays


def release_workers() -> None:
    """End the OpenMP workers of the calling thread, which must not be inside a parallel region."""
    pause = _pause_call()
    if pause is not None:
        pause(_PAUSE_SOFT)


@functools.cache
def _pause_call() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the runtime that PyTorch brings; None where there is no such thing."""
    only_if_loaded = getattr(os, "RTLD_NOLOAD", None)
    if only_if_loaded is None:
        return None
    for library in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        try:
            return ctypes.CDLL(str(library), mode=only_if_loaded).omp_pause_resource_all
        except (OSError, AttributeError):  # another runtime is loaded, or an older one
            continue
    return None


def trim_freed_memory() -> None:
    """Return to the system what the process has freed and still keeps; does nothing but with glibc."""
    if _KEPT:
        _KEPT[0].give_back()
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def retain_freed_memory() -> None:
    """Keep what the process frees; does nothing but with glibc, or where the user has chosen an allocator or its limits."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    chosen |= any("malloc" in os.environ.get(name, "") for name in ("GLIBC_TUNABLES", "LD_PRELOAD"))
    if _KEPT or chosen or not _of_libc("mallinfo2"):  # what is kept must be known, or it looks used
        return
    if memory := own_memory():
        _KEPT.append(memory)
        trim_freed_memory()  # of what there was before
    else:
        for option, value in _KEEPING:
            _of_libc("mallopt")(option, value)


def retained_bytes() -> int:
    """Bytes that the process has freed and still keeps, and may use again; 0 where that cannot be known."""
    if _KEPT:
        return _KEPT[0].kept()
    count = _of_libc("mallinfo2")
    if count is None:
        return 0
    count.restype = _HeapFigures
    heap = count()
    return max(min(heap.fordblks, _resident_heap() - heap.uordblks), 0)


def _resident_heap() -> int:
    """Bytes of the heap that are in memory: what has gone back to the system is still free to ``malloc``, and not there."""
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8") as maps:
        inside = False
        for line in maps:
            inside = inside or line.rstrip().endswith("[heap]")
            if inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return 0


class _HeapFigures(ctypes.Structure):
    """``struct mallinfo2``; of it are used: bytes in use and free in the heap, and in pieces apart from it."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _of_libc(name: str) -> Any:
    """A function of the C library of Linux, or None."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
