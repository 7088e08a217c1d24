"""A tensor-parallel rank holds its shard of a checkpoint, and nothing of the file that it was read from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from tests.support.tiny import save_tiny_checkpoint


def memory_behind_weights(engine):
    """Return the bytes of the weights, the bytes of their storage, and the mapped checkpoint files."""
    weights = [getattr(p, "_local_tensor", p) for p in engine.actor.model.module.parameters()]
    places = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
    needed = {w.data_ptr(): w.nbytes for w in weights}
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    return sum(needed.values()), sum(places.values()), files


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_does_not_keep_the_whole_weight_or_the_file_in_memory(tmp_path):
    path = save_tiny_checkpoint(tmp_path / "qwen3", "qwen3", heads=4, hidden=64)
    group = EngineGroup(str(path), EngineConfig(kv_cache_tokens=1024, decode="eager"), Layout(tp_size=2))
    try:
        for needed, held, files in group.run_on_all_ranks(memory_behind_weights):
            assert held == needed
            assert files == []
    finally:
        group.close()
