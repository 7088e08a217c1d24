"""The process's random state (Python, NumPy, and torch on the CPU) as plain JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Capture the states of the global CPU generators of Python, NumPy and torch."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the states captured by :func:`capture_rng`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    buffer = bytearray(base64.b64decode(state["torch"]))
    torch.set_rng_state(torch.frombuffer(buffer, dtype=torch.uint8))
