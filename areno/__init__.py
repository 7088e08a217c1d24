"""areno: reinforcement-learning post-training for language models, on anything from a laptop CPU to several GPUs.

The public API can be imported from ``areno`` or ``areno.api``. Imports are lazy: ``import areno`` does not import torch.
docs/architecture.md describes the packages.
"""

import importlib
import os
from typing import Any

# How long an idle OpenMP thread spins before it sleeps. With a small model, waking a thread takes longer than its work.
# With this value (a spin of about 40 ms), a training step on two cores takes 28 ms; with a spin of 0.5 ms it takes 42 ms.
# If another process is busy, the step takes 100 ms (spin of 40 ms), 115 ms (0.5 ms) or 400 ms (13 ms, GNU OpenMP's default).
# OpenMP reads the variable when torch is loaded. A value that the user has set is kept.
DEFAULT_SPINCOUNT = "1000000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", DEFAULT_SPINCOUNT)

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
