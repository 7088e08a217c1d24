"""A real vLLM in an environment of its own, and a model that it computes with on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.experiments import toy

VLLM = Path(__file__).parents[2] / ".peers" / "vllm" / "bin" / "vllm"
# It is a package of gigabytes that clashes with areno's own torch, so that nobody needs it to test the rest.
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: bash benchmarks/peers.sh vllm")


def make_wide_toy(folder: Path) -> None:
    """The toy of the examples, with heads of a size that vLLM has on a CPU."""
    toy.make_toy(folder, head_dim=32)
