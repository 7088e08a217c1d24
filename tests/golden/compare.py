"""What two recorded golden runs must share: metrics but times, samples, and every tensor that was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_MACHINE = re.compile(r"time|per_second|tokens_per|memory|_bytes|pause|/wall")
"""Parts of the names of statistics that depend on the machine's load."""


def differences(name: str, before: Path, after: Path) -> Iterator[str]:
    """Differences of one run.

    Args:
        name: of the run, as its folder is called.
        before: folder of the first recording.
        after: folder of the second.
    """
    first, second = before / name, after / name
    for file in ("metrics.jsonl", "samples.jsonl"):
        pairs = [(_lines(path, file)) for path in (first, second)]
        yield from _of_records(f"{name} {file}", *pairs)
    yield from _of_tensors(name, _tensors(first), _tensors(second))


def _lines(folder: Path, file: str) -> list[dict[str, Any]]:
    found = sorted(folder.rglob(file))
    return [_settled(json.loads(line)) for path in found for line in path.read_text(encoding="utf-8").splitlines()]


def _settled(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not _MACHINE.search(name)}


def _of_records(what: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    if len(before) != len(after):
        yield f"{what}: {len(before)} lines before, {len(after)} after"
    for number, (one, other) in enumerate(zip(before, after, strict=False), start=1):
        for key in dict.fromkeys((*one, *other)):
            if one.get(key, "absent") != other.get(key, "absent"):
                yield f"{what}:{number} {key}: {one.get(key, 'absent')!r} before, {other.get(key, 'absent')!r} after"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of checkpoints, by their place below the folder; links to the toy are not followed."""
    files = [path for path in folder.rglob("*.safetensors") if not path.is_symlink()]
    own = [path for path in files if not any(part.is_symlink() for part in path.relative_to(folder).parents)]
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(own)
        if not any((folder / part).is_symlink() for part in path.relative_to(folder).parents)
        for name, tensor in load_file(path).items()
    }


def _of_tensors(name: str, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Iterator[str]:
    if not before and not after:
        yield f"{name}: no weights were saved"
    for key in dict.fromkeys((*before, *after)):
        if key not in before or key not in after:
            yield f"{name} {key}: only {'before' if key in before else 'after'}"
        elif not torch.equal(before[key], after[key]):
            furthest = float((before[key].double() - after[key].double()).abs().max())
            yield f"{name} {key}: differs by up to {furthest:.3g}"
