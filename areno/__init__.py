"""areno: reinforcement-learning post-training for language models, from a laptop CPU up.

The public API is available here and under ``areno.api``. Imports are lazy: ``import areno`` does not import torch.
Map of the packages: docs/architecture.md.
"""

import importlib
import os
from typing import Any

# How long an idle OpenMP thread spins before it sleeps. For a small model, waking a thread costs more than the thread's work: a
# training step of 28 ms on two cores takes 42 ms with a spin of 0.5 ms. Next to a busy process, GNU OpenMP's default of about
# 13 ms is the worst (400 ms per step); a short spin takes 115 ms, and this spin (40 ms) takes 100 ms, because a spinning thread
# keeps its core. The value must be set before torch is loaded; the user's own value wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000000")

__version__ = "0.1.0"

_MODULES = ("api", "loss_fns")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"areno.{name}")
    api = importlib.import_module("areno.api")
    if name == "__all__":  # from areno import *
        return list(api.__all__)
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'areno' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *importlib.import_module("areno.api").__all__])
