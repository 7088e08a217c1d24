"""areno: reinforcement-learning post-training for language models, from a laptop CPU up.

Everything public is here and under ``areno.api``; both names give the same object. Nothing heavy is imported before it
is used: ``import areno`` does not import torch.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

# GNU OpenMP threads spin for a long time at every barrier by default. Beside one other busy process a tiny training step
# then took 25 times longer (1.3 s instead of 0.05 s on two cores); with a short spin it takes twice as long, and nothing
# is lost on an idle machine. It must be set before torch is loaded; a value of the user's own wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"

_MODULES = ("api", "loss_fns")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"areno.{name}")
    api = importlib.import_module("areno.api")
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'areno' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *importlib.import_module("areno.api").__all__])
