"""Number of GPUs that this process may use. On Linux without a GPU driver, PyTorch is not imported."""

import sys
from pathlib import Path

_NODES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")
"""Device nodes in ``/dev`` of NVIDIA GPUs, NVIDIA embedded boards, WSL and AMD GPUs."""


def visible_gpus(nodes: Path = Path("/dev")) -> int:
    """Return the number of GPUs that PyTorch sees. ``CUDA_VISIBLE_DEVICES`` may reduce this number."""
    no_driver = sys.platform == "linux" and not any(path for name in _NODES for path in nodes.glob(name))
    if no_driver and "torch" not in sys.modules:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
