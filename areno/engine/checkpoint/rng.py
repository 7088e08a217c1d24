"""Capture and restore the random state of the process (Python, NumPy, and PyTorch on the CPU) as JSON data."""

import base64
import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy and PyTorch (CPU only) as JSON data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the states that :func:`capture_rng` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    buffer = bytearray(base64.b64decode(state["torch"]))
    torch.set_rng_state(torch.frombuffer(buffer, dtype=torch.uint8))
