"""areno: reinforcement-learning post-training for language models, from a laptop CPU up.

The public API can be imported from ``areno`` or ``areno.api``. Imports are lazy: ``import areno`` does not import torch.
Map of the packages: docs/architecture.md.
"""

import importlib
import os
from typing import Any

# How long an idle OpenMP thread spins before it sleeps. With a small model, waking a sleeping thread costs more than its work.
# A training step on two cores takes 28 ms with this value (a spin of about 40 ms), and 42 ms with a spin of 0.5 ms. Next to a
# busy process it takes 100 and 115 ms, because a spinning thread keeps its core, and 400 ms with GNU OpenMP's default (13 ms).
# OpenMP reads the variable when torch is loaded. The user's own value wins.
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
