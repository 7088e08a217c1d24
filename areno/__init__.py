"""areno: reinforcement-learning post-training for language models, from a laptop CPU up.

Everything public is here and under ``areno.api``; both names give the same object. Nothing heavy is imported before it
is used: ``import areno`` does not import torch.
"""

import importlib
import os
from typing import Any

# How long an idle OpenMP thread spins before it sleeps. Waking it costs a small model more than its work: training steps
# of 28 ms on two cores took 42 with a spin of 0.5 ms. Beside a busy process GNU OpenMP's default of about 13 ms is the worst
# choice of all (400 ms), a short spin gives 115 ms, and one of 40 ms, this one, 100 ms: whoever spins keeps its place.
# It must be set before torch is loaded; a value of the user's own wins.
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
