"""What the C libraries below PyTorch should do for a process that generates and trains on CPUs.

*One pool of OpenMP workers at a time.* Every thread that calls into PyTorch gets OpenMP workers of its own, and keeps
them. The rollout loop and the thread that trains would have twice as many as there are cores, and GNU OpenMP then lets all
of them sleep at every barrier: on two cores a decode step took 15 ms where it takes 4. So a thread whose turn is over lets
its workers go; the next parallel region starts them again, which takes well under a millisecond.

*Memory is kept.* The C library gives freed memory back to the system at once and takes it again in the next step, page by
page: a GRPO step of a 0.9 M model took 0.74 s instead of 0.69 on two cores. What is kept lies in pieces, though, which larger
requests do not fit into: a step of a 210 M model held 600 MiB more than was in use, of 4.2 GiB. With large weights only
small pieces are kept therefore, and none when the optimizer's step begins; pages cost little beside large products.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

# mallopt of glibc: allocations of this size and more are returned to the system (32 MiB is the most it takes), and so is
# the end of the heap when that much of it is free.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_KEPT, _KEPT_BESIDE_LARGE_WEIGHTS, _KEPT_END = 32 << 20, 2 << 20, 1 << 30
_LARGE_WEIGHTS = 256 << 20
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


def give_freed_memory_back() -> None:
    """Return to the system what the process has freed and still keeps; does nothing but on Linux."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def are_large(weights: int) -> bool:
    """Whether beside so many bytes of weights freed memory is worth more elsewhere than kept."""
    return weights >= _LARGE_WEIGHTS


def keep_freed_memory(weights: int) -> None:
    """Let the C library keep what the process frees, less beside large ``weights`` (bytes); does nothing but on Linux.

    Limits that the user has set stay.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        kept = _KEPT_BESIDE_LARGE_WEIGHTS if are_large(weights) else _KEPT
        if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            mallopt(_MMAP_THRESHOLD, kept)
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
            mallopt(_TRIM_THRESHOLD, _KEPT_END)
