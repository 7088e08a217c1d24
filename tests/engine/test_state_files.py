"""States on disk: parts of tensors, read as other parts, and by PyTorch's own reader of distributed checkpoints."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader

from areno.engine.parallel.rank_context import RankContext
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.state_files import SavedState, StatePart, flat_parts, full_index, save_state
from tests.support.optimizer_states import saved

HEAD = {"names": ["w"], "counts": {"w": 1}, "masters": False}


def save_as(rank, folder, parts, head=HEAD):
    """Save as one of several ranks, which take turns; the channels between them are fake."""
    peers = SimpleNamespace(rank=rank, first=rank == 0, all_reduce_min=int, pipeline=RankContext().pipeline)
    save_state(folder, head, parts, peers)


def even_and_odd(size):
    return torch.arange(0, size, 2), torch.arange(1, size, 2)


def test_strided_parts_are_read_as_any_other_parts(tmp_path):
    """Each of two ranks has every other pair of rows, in parts of every other column: no part is one rectangle."""
    whole = torch.arange(8 * 5.0).view(8, 5)
    rows = torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])
    for rank, own in enumerate(rows):
        parts = [StatePart("w", whole[own][:, columns], (own, columns)) for columns in even_and_odd(5)]
        save_as(rank, tmp_path, parts)
    state = SavedState(tmp_path)
    assert torch.equal(state.read_full("w"), whole)
    index = (torch.tensor([1, 2, 3, 7]), torch.tensor([0, 3, 4]))
    assert torch.equal(state.read("w", index), whole[index[0]][:, index[1]])
    assert state.read("w", (torch.arange(0), torch.arange(5))).shape == (0, 5)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_range_of_the_flattened_tensor_is_split_into_a_few_boxes(shape, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    parts = list(flat_parts("w", whole.flatten()[start:stop], start, full_index(shape)))
    assert torch.cat([part.values.flatten() for part in parts] or [torch.zeros(0)]).tolist() == list(range(start, stop))
    for part in parts:
        assert torch.equal(whole[torch.meshgrid(*part.index, indexing="ij")] if shape else whole, part.values)
    assert len(parts) <= max(2 * len(shape) - 1, 1)


def test_a_missing_file_is_an_error_not_a_hole(tmp_path):
    whole = torch.arange(6.0)
    for rank in range(2):
        save_as(rank, tmp_path, flat_parts("w", whole[3 * rank :][:3], 3 * rank, full_index([6])))
    next(tmp_path.glob("shard-00001-*")).unlink()
    with pytest.raises(ValueError, match="w is incomplete, because the file of a rank is missing"):
        SavedState(tmp_path).read("w", full_index([6]))


def test_stages_of_a_pipeline_have_one_head(tmp_path):
    first = {"names": ["tied", "a"], "counts": {"a": 2}, "steps": 2, "masters": False}
    stages = [first, {"names": ["b", "tied"], "counts": {"b": 2}, "masters": True}]
    pipeline = SimpleNamespace(all_gather=lambda head: stages)
    save_state(tmp_path, stages[0], [], SimpleNamespace(rank=0, first=True, all_reduce_min=int, pipeline=pipeline))
    head = json.loads((tmp_path / "state.json").read_text())
    assert head == {"names": ["tied", "a", "b"], "counts": {"a": 2, "b": 2}, "steps": 2, "masters": True}


def test_pytorch_reads_the_files_as_a_distributed_checkpoint(tmp_path):
    """Files of two ranks, and of an optimizer in one process."""
    whole = torch.randn(6, 4)
    for rank in range(2):
        own = whole.flatten()[13 * rank :][: 13 - 2 * rank]
        save_as(rank, tmp_path / "two", flat_parts("w", own, 13 * rank, full_index([6, 4])))
    read = {"w": torch.zeros(6, 4)}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "two")), no_dist=True)
    assert torch.equal(read["w"], whole)
    shapes = {"a": (3, 4), "b": ()}
    weights = {name: torch.nn.Parameter(torch.randn(shape).to(torch.bfloat16)) for name, shape in shapes.items()}
    optimizer = MasterAdamW(list(weights.items()), OptimizerOptions())
    sum(w.sum() for w in weights.values()).backward()
    optimizer.collect()
    optimizer.step()
    found = SavedState(saved(optimizer, tmp_path / "one"))
    read = {key: torch.zeros_like(found.read_full(key)) for key in found.tensor_names()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "one")), no_dist=True)
    kinds = ("state.{}.exp_avg", "state.{}.exp_avg_sq", "master.{}")
    assert read.keys() == {kind.format(name) for name in weights for kind in kinds}
    parts = {part.key: part.values for part in optimizer.state_parts()}
    assert all(torch.equal(read[key], parts[key]) for key in read)
