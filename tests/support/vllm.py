"""A real vLLM in its own environment, and a model that it supports on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.experiments import toy

VLLM = Path(__file__).parents[2] / ".peers" / "vllm" / "bin" / "vllm"
# Optional, because vLLM takes gigabytes and conflicts with areno's torch.
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: bash benchmarks/peers.sh vllm")


def make_wide_toy(folder: Path) -> None:
    """Write the toy model of the examples, with a head size that vLLM supports on a CPU."""
    toy.make_toy(folder, head_dim=32)
