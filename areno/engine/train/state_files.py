"""Save optimizer states to disk, and load them. If several ranks hold the same shard, only one rank writes the shard.
Each rank reads the shards that its layout needs.

    state.json                                      step count, parameter names, format of the moments
    shard-00001-model-00001-of-00001.safetensors    shards of rank 0: ``state.<parameter>.exp_avg``, ``master.<parameter>``

The files are PyTorch distributed checkpoints in safetensors format, which the ``HuggingFaceStorageReader`` of
``torch.distributed.checkpoint`` can read. The metadata of a file contains the offset of each shard in its tensor. A
file contains at most one shard of each tensor. A rank with several shards of a tensor therefore writes several files.

PyTorch's own writer is not used, because it requires a process group of all ranks and saves strided shards as if they
were contiguous. By default, PyTorch's writer also uses pickle, which can run code when a file is read.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from areno.engine.parallel.rank_context import RankContext

_HEAD = "state.json"
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

Index = tuple[Tensor, ...]
"""For each dimension, the indices of a shard's entries in the unsharded tensor."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One rank's shard of a tensor of the optimizer state."""

    key: str
    values: Tensor
    index: Index


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: Any
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def full_index(shape: Sequence[int]) -> Index:
    """Return the :data:`Index` of an unsharded tensor."""
    return tuple(torch.arange(size) for size in shape)


def flat_parts(key: str, values: Tensor, start: int, index: Index) -> Iterator[StatePart]:
    """Split a range of a flattened tensor into parts that are rectangular in the shape before flattening.

    ``values`` [N] are the entries of the range, which begins at ``start``. ``index`` describes the tensor, which may itself
    be a shard of a larger tensor; see :data:`Index`.
    """
    for box in _boxes_of_range([len(axis) for axis in index], start, start + len(values)):
        shape = [part.stop - part.start for part in box]
        own, values = values[: math.prod(shape)], values[math.prod(shape) :]
        yield StatePart(key, own.view(shape), tuple(axis[part] for axis, part in zip(index, box, strict=True)))


def save_state(folder: Path, head: dict[str, Any], parts: Iterable[StatePart], peers: RankContext) -> None:
    """Replace the contents of ``folder`` with the state of one optimizer. All ranks must call this with the same folder."""
    if peers.first and folder.exists():  # another layout's files have different names
        shutil.rmtree(folder)
    peers.all_reduce_min(0)  # barrier
    folder.mkdir(exist_ok=True)
    files: list[dict[str, tuple[Tensor, tuple[int, ...]]]] = []
    for part in parts:
        for local, offsets in _boxes(part.index):
            target = next((file for file in files if part.key not in file), None)
            if target is None:
                files.append(target := {})
            target[part.key] = part.values[local].detach().cpu().contiguous(), offsets
    for number, file in enumerate(files, start=1):
        sharding = {key: {_OFFSETS: list(offsets)} for key, (_, offsets) in file.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
        name = f"shard-{peers.rank + 1:05}-model-{number:05}-of-{len(files):05}.safetensors"
        save_file({key: values for key, (values, _) in file.items()}, folder / name, metadata)
    head = _joined_head(peers.pipeline.all_gather(head))
    if peers.first:
        (folder / _HEAD).write_text(json.dumps(head, indent=1), encoding="utf-8")


def _joined_head(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the ``state.json`` fields of all pipeline stages. A tied parameter occurs in several stages, but is listed once."""
    counts = {name: count for stage in stages for name, count in stage["counts"].items()}
    names = list(dict.fromkeys(n for stage in stages for n in stage["names"]))
    return stages[0] | {"names": names, "counts": counts, "masters": any(stage["masters"] for stage in stages)}


class SavedState:
    """An optimizer state that :func:`save_state` has written.

    The run that reads the state may have another parallel layout than the run that wrote the state.

    The constructor raises OSError, ValueError or SafetensorError if the folder is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.head: dict[str, Any] = json.loads((folder / _HEAD).read_text(encoding="utf-8"))
        self._chunks: dict[str, list[_Chunk]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            metadata = file.metadata() or {}
            if _SHARDING not in metadata:
                raise ValueError(f"the file {path} has no shard metadata and is not part of a saved optimizer state")
            sharding = json.loads(metadata[_SHARDING])
            for key in sharding:
                offsets, sizes = tuple(sharding[key][_OFFSETS]), tuple(file.get_slice(key).get_shape())
                self._chunks.setdefault(key, []).append(_Chunk(file, offsets, sizes))

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def tensor_names(self) -> list[str]:
        """Return the keys of all saved tensors."""
        return list(self._chunks)

    def read_full(self, key: str) -> Tensor:
        """Read a whole tensor into host memory."""
        ends = ([o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in self._chunks[key])
        return self.read(key, full_index([max(axis) for axis in zip(*ends, strict=True)]))

    def read(self, key: str, index: Index) -> Tensor:
        """Read a shard of a tensor into host memory.

        Raises:
            KeyError: there is no tensor ``key``.
            ValueError: the files lack some entries of the shard.
        """
        chunks = self._chunks[key]
        if not index:
            return chunks[0].file.get_tensor(key)  # type: ignore[no-any-return]
        pieces = [
            (local, chunk.file.get_slice(key)[there])
            for where, offsets in _boxes(index)
            for chunk in chunks
            for local, there in _overlap(where, offsets, chunk)
        ]
        values = torch.empty([len(axis) for axis in index], dtype=pieces[0][1].dtype if pieces else torch.float32)
        for local, piece in pieces:
            values[local] = piece
        if sum(piece.numel() for _, piece in pieces) != values.numel():
            raise ValueError(f"the saved tensor {key} is incomplete, because the file of a rank is missing")
        return values


def _overlap(
    local: tuple[slice, ...], offsets: tuple[int, ...], chunk: _Chunk
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Compute the overlap of a saved chunk with a box of a shard.

    ``local`` and ``offsets`` describe the box; see :func:`_boxes`. Yield a tuple of slices that select the overlap in the
    shard, and a tuple of slices that select the overlap in the chunk. Yield nothing if there is no overlap.
    """
    here, there = [], []
    for own, offset, start, size in zip(local, offsets, chunk.offsets, chunk.sizes, strict=True):
        first, last = max(offset, start), min(offset + own.stop - own.start, start + size)
        if first >= last:
            return
        here.append(slice(own.start + first - offset, own.start + last - offset))
        there.append(slice(first - start, last - start))
    yield tuple(here), tuple(there)


def _boxes(index: Index) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Split a shard into boxes: rectangular parts that are contiguous in each dimension of the unsharded tensor.

    ``index`` describes the shard; see :data:`Index`. For each box, yield its slices in the shard, and its offsets in the
    unsharded tensor.
    """
    for runs in product(*map(_runs, index)):
        yield tuple(slice(first, last) for first, last, _ in runs), tuple(offset for *_, offset in runs)


def _runs(axis: Tensor) -> list[tuple[int, int, int]]:
    """Split ``axis`` into ranges of consecutive values. Return tuples (start, stop, value at start) of the ranges."""
    if not len(axis):
        return []
    breaks = (axis.diff() != 1).nonzero().flatten() + 1
    return [(first, last, int(axis[first])) for first, last in pairwise([0, *breaks.tolist(), len(axis)])]


def _boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Split a range of a flattened tensor into parts that are rectangular in ``shape``, and yield the slices of each part."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (slice(start, stop),) if shape else ()
        return
    row = math.prod(shape[1:])
    if start % row == 0 and stop - start >= row:
        rows = (stop - start) // row
        yield slice(start // row, start // row + rows), *(slice(0, size) for size in shape[1:])
        yield from _boxes_of_range(shape, start + rows * row, stop)
        return
    first = start // row
    end = min(stop, (first + 1) * row)
    for box in _boxes_of_range(shape[1:], start - first * row, end - first * row):
        yield slice(first, first + 1), *box
    yield from _boxes_of_range(shape, end, stop)
