"""What must agree in two recorded golden runs: metrics except times, samples, and all saved tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_MACHINE = re.compile(r"time|per_second|tokens_per|memory|_bytes|pause|/wall|checkpoint_for_recover")
"""Parts of the names of metrics that depend on the machine's load."""


_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""Tolerances for numbers of runs that round differently each time."""
_WEIGHTS = 1e-3
"""The same for a weight: in Adam's first steps, a gradient that is only rounding error causes a full step."""


def differences(name: str, before: Path, after: Path, exact: bool) -> Iterator[str]:
    """Differences of one run.

    Args:
        name: name of the run and of its folder.
        before: folder of the first recording.
        after: folder of the second.
        exact: whether they must agree bit for bit.
    """
    first, second = before / name, after / name
    for file in ("metrics.jsonl", "samples.jsonl"):
        pairs = [(_lines(path, file)) for path in (first, second)]
        yield from _of_records(f"{name} {file}", *pairs, exact)
    yield from _of_tensors(name, _tensors(first), _tensors(second), 0.0 if exact else _WEIGHTS)


def _lines(folder: Path, file: str) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob(file))
    return [_settled(json.loads(line)) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def _settled(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not _MACHINE.search(name)}


def _same(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(a, b, exact) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], exact) for key in one)
    if not exact and isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return bool(one == other)


def _of_records(what: str, before: list[dict[str, Any]], after: list[dict[str, Any]], exact: bool) -> Iterator[str]:
    if len(before) != len(after):
        yield f"{what}: {len(before)} lines before, {len(after)} after"
    for number, (one, other) in enumerate(zip(before, after, strict=False), start=1):
        for key in dict.fromkeys((*one, *other)):
            if not _same(one.get(key, "absent"), other.get(key, "absent"), exact):
                yield f"{what}:{number} {key}: {one.get(key, 'absent')!r} before, {other.get(key, 'absent')!r} after"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of checkpoints, by their path below the folder and name; links to the toy are not followed."""
    files = [
        path for path in folder.rglob("*.safetensors") if "trainer_state" not in path.parts and not path.is_symlink()
    ]
    own = [path for path in files if not any(part.is_symlink() for part in path.relative_to(folder).parents)]
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(own)
        if not any((folder / part).is_symlink() for part in path.relative_to(folder).parents)
        for name, tensor in load_file(path).items()
    }


def _of_tensors(
    name: str, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], most: float
) -> Iterator[str]:
    if not before and not after:
        yield f"{name}: no weights were saved"
    for key in dict.fromkeys((*before, *after)):
        if key not in before or key not in after:
            yield f"{name} {key}: only {'before' if key in before else 'after'}"
            continue
        furthest = float((before[key].double() - after[key].double()).abs().max())
        if not furthest <= most:  # also true for NaN
            yield f"{name} {key}: differs by up to {furthest:.3g}"
