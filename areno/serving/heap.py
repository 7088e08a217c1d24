"""What Python's garbage collector need not look at."""

from __future__ import annotations

import functools
import gc


@functools.cache
def keep_heap_out_of_collections() -> None:
    """Let the collector no longer go through what exists by now: modules, model, tokenizer. Once per process.

    A server makes many small objects, and each full collection went through a million others: a fifth of its time.
    """
    gc.collect()
    gc.freeze()
