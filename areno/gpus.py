"""GPUs: how many this process may use. Where there are none, PyTorch is not loaded to find out."""

import sys
from pathlib import Path

_NODES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")
"""What the drivers of NVIDIA, of its embedded boards, of WSL and of AMD put into ``/dev``."""


def visible_gpus(nodes: Path = Path("/dev")) -> int:
    """GPUs that PyTorch sees; ``CUDA_VISIBLE_DEVICES`` hides some."""
    no_driver = sys.platform == "linux" and not any(path for name in _NODES for path in nodes.glob(name))
    if no_driver and "torch" not in sys.modules:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
