"""Tune OpenMP and the C allocator for a process that generates and trains on CPUs.

*Idle threads stop their OpenMP workers.* By default, every thread that calls PyTorch gets its own OpenMP workers and keeps
them. The rollout thread and the training thread would therefore together have twice as many workers as there are cores. With
more workers than cores, GNU OpenMP makes all workers sleep at every barrier: on two cores, a decode step takes 15 ms instead of
4 ms. For this reason, a thread of areno stops its workers when the thread becomes idle. The thread's next parallel region
restarts the workers in well under a millisecond.

*Freed memory is retained.* By default, malloc returns large freed blocks to the system, so each new block causes page faults. A
training step on 64 rows with a model of 135 M parameters caused 10 million page faults, which raised the time on two cores from
14.6 s to 22 s. Large tensors therefore come from a caching allocator (:mod:`areno.engine.kernels.cpu_memory`). If the caching
allocator cannot be compiled, glibc is set to keep all freed memory in one heap. The fragmentation of this heap raises the peak
memory by 33% to 100%. If little memory is free when training starts on a microbatch, all retained memory is first returned to
the system.
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

from areno.engine.kernels.cpu_memory import CachingAllocator, install_caching_allocator

# mallopt options of glibc: no mmapped blocks, no trimming, one arena for all threads.
_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8
_RETAIN_OPTIONS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
_ALLOCATOR: list[CachingAllocator] = []  # the caching allocator, once installed
_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: keeps the program's settings


def release_workers() -> None:
    """Stop the OpenMP workers of the calling thread. The calling thread must not be inside a parallel region."""
    pause = _pause_call()
    if pause is not None:
        pause(_PAUSE_SOFT)


@functools.cache
def _pause_call() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of PyTorch's OpenMP runtime; None if the runtime has no such function."""
    only_if_loaded = getattr(os, "RTLD_NOLOAD", None)
    if only_if_loaded is None:
        return None
    for library in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        try:
            return ctypes.CDLL(str(library), mode=only_if_loaded).omp_pause_resource_all
        except (OSError, AttributeError):  # not loaded, or older than OpenMP 5.0
            continue
    return None


def trim_freed_memory() -> None:
    """Give freed memory back to the system instead of keeping it for reuse. Without glibc, this function does nothing."""
    if _ALLOCATOR:
        _ALLOCATOR[0].release_unused()
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def retain_freed_memory() -> None:
    """Keep freed memory in the process for reuse. The function needs glibc 2.33 or newer.

    The function does nothing if environment variables configure malloc or preload an allocator.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    chosen |= any("malloc" in os.environ.get(name, "") for name in ("GLIBC_TUNABLES", "LD_PRELOAD"))
    if _ALLOCATOR or chosen or not _of_libc("mallinfo2"):  # unmeasurable retained memory would count as used
        return
    if allocator := install_caching_allocator():
        _ALLOCATOR.append(allocator)
        trim_freed_memory()  # what malloc retained before the allocator was installed
    else:
        for option, value in _RETAIN_OPTIONS:
            _of_libc("mallopt")(option, value)


def retained_bytes() -> int:
    """Return the size in bytes of the freed memory that is retained for reuse; 0 if the size is unknown."""
    if _ALLOCATOR:
        return _ALLOCATOR[0].unused_bytes()
    count = _of_libc("mallinfo2")
    if count is None:
        return 0
    count.restype = _HeapFigures
    heap = count()
    return max(min(heap.fordblks, _resident_heap() - heap.uordblks), 0)


def _resident_heap() -> int:
    """Return the resident size of malloc's heap in bytes, read from ``smaps``.

    The size from ``mallinfo2`` would include pages that ``malloc_trim`` has returned to the system.
    """
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8") as maps:
        inside = False
        for line in maps:
            inside = inside or line.rstrip().endswith("[heap]")
            if inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return 0


class _HeapFigures(ctypes.Structure):
    """``struct mallinfo2``. ``uordblks`` is the number of used bytes of the heap, and ``fordblks`` the number of free bytes."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _of_libc(name: str) -> Any:
    """Return a function of the C library; None if the function does not exist, or if the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
