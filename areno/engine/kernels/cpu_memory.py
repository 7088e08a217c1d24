"""A caching allocator for large CPU tensors. The allocator needs Linux and a C++ compiler.

In one measurement, a model with 135 M parameters was trained with an adapter on 64 rows, with activation recomputation. The
peak memory of the process was 5.4 GB with the allocator of glibc 2.36, and 2.6 GB with this allocator. Training steps took
equally long with the two allocators. Compiling this allocator takes a second.
"""

import ctypes
import functools
import sys

from areno.engine.kernels.library import KernelLibrary


@functools.cache
def install_caching_allocator() -> "CachingAllocator | None":
    """Install the caching allocator for large tensors. Return None if the system is not Linux, or if the installation fails."""
    library = KernelLibrary("cpu_memory", stable_abi=False)
    if sys.platform != "linux" or library.build() or not library.load():
        return None
    functions = ctypes.CDLL(str(library.path()))
    return CachingAllocator(functions) if functions.areno_memory_open() else None


class CachingAllocator:
    """The installed caching allocator."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._functions = functions
        functions.areno_memory_unused_bytes.restype = ctypes.c_size_t

    def unused_bytes(self) -> int:
        """Return the size in bytes of the freed memory that the allocator keeps for reuse."""
        return int(self._functions.areno_memory_unused_bytes())

    def release_unused(self) -> None:
        """Release the allocator's freed memory to the system."""
        self._functions.areno_memory_release_unused()
