"""What Python's garbage collector need not look at while a server runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator

_SELDOM = (50_000, 20, 20)
_lock = threading.Lock()
_usual: list[tuple[int, int, int]] = []  # thresholds before each server that runs


@contextlib.contextmanager
def seldom_collections() -> Iterator[None]:
    """Let the collector look seldom, and no longer at what existed before: modules, model, tokenizer.

    A server makes many small objects that are no garbage yet; going through them, and through a million others in each
    full collection, was a fifth of its time. Afterwards it looks as often as before: training must not keep dead tensors.
    """
    _keep_heap_out_of_collections()
    with _lock:
        _usual.append(gc.get_threshold())
        if gc.get_threshold()[0]:  # 0 is how a program turns collections off
            gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _lock:
            before = _usual.pop()
            if not _usual and gc.get_threshold() == _SELDOM:
                gc.set_threshold(*before)


@functools.cache
def _keep_heap_out_of_collections() -> None:
    """Once per process: a second time would keep what has become garbage since."""
    gc.collect()
    gc.freeze()
