"""The memory benchmark measures each phase of the plan, in one process and in several."""

import sys
from pathlib import Path

import pytest

import areno  # noqa: F401

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "workers")]

import common  # noqa: E402
import memory  # noqa: E402


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1", "dp2", "tp2"])
def test_every_phase_is_measured(layout, tmp_path):
    common.make_checkpoint(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=600)
    result = memory.compare(tmp_path / "model", memory.SETS["grpo"] | memory.LAYOUTS[layout], threads=1)
    assert set(result["phases"]) == {"load", "rollout", "forward", "backward", "optimizer"}
    ranks = 1 if layout == "1" else 2
    for phase in result["phases"].values():
        # The model is so small that the memory is that of a process's code, tables and threads.
        assert 10 * ranks < phase["measured_mib"] < 1000 * ranks
