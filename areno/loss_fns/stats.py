"""Statistics that add up exactly over microbatches.

A loss reports objects of this module; the engine adds up their parts over the optimizer step and over all ranks, and makes
scalars of them once. A plain number in the metrics is averaged with the weights of the loss itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areno.loss_fns.pack import in_float

Parts = list[float]


@dataclass(frozen=True, slots=True)
class Mean:
    """Sum and count of a quantity; becomes one scalar under its own name."""

    total: Tensor
    count: Tensor

    def detached(self) -> Mean:
        """The same, without gradient."""
        return Mean(self.total.detach(), self.count)


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, sum and sum of squares; becomes ``<name>_mean`` and ``<name>_std`` (population)."""

    total: Tensor
    square: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """Count, sum, least and greatest of a quantity; becomes ``<name>/avg``, ``<name>/min`` and ``<name>/max``.

    Without a single value there are no scalars at all, because nothing is least.
    """

    total: Tensor
    count: Tensor
    least: Tensor
    greatest: Tensor


@dataclass(frozen=True, slots=True)
class Count:
    """How many there are; becomes one scalar under its own name, the sum over the optimizer step."""

    total: Tensor


Statistic = Mean | Spread | Range | Count


def parts_of(statistic: Statistic) -> tuple[str, list[Tensor]]:
    """Name of a statistic's kind, and its numbers as tensors, which need not be read one by one."""
    return type(statistic).__name__.lower(), [getattr(statistic, entry.name) for entry in fields(statistic)]


def merge_parts(kind: str, left: Parts, right: Parts) -> Parts:
    """Numbers of two microbatches or ranks as those of both."""
    merged = [a + b for a, b in zip(left, right, strict=True)]
    if kind == "range":
        merged[2:] = [min(left[2], right[2]), max(left[3], right[3])]
    return merged


def scalars_of(name: str, kind: str, parts: Parts) -> dict[str, float]:
    """What is reported of a statistic in the end."""
    if kind == "count":
        return {name: parts[0]}
    if kind == "range":
        average = parts[0] / (parts[1] or 1.0)
        return {f"{name}/avg": average, f"{name}/min": parts[2], f"{name}/max": parts[3]} if parts[1] else {}
    count = parts[-1] or 1.0
    mean = parts[0] / count
    if kind == "mean":
        return {name: mean}
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(max(parts[1] / count - mean * mean, 0.0))}


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean of values where mask is true."""
    return Mean(torch.where(mask, in_float(values.detach()), 0.0).sum(), mask.sum())


def masked_spread(values: Tensor, mask: Tensor) -> Spread:
    """Mean and deviation of values where mask is true, summed in float64 so that small deviations survive."""
    kept = torch.where(mask, values.detach().double(), 0.0)
    return Spread(kept.sum(), kept.square().sum(), mask.sum())


def masked_range(values: Tensor, mask: Tensor) -> Range:
    """Mean, least and greatest of values where mask is true; infinite bounds where it never is."""
    values = values.detach().double()
    bounds = [torch.where(mask, values, bound) for bound in (torch.inf, -torch.inf)]
    empty = torch.tensor([torch.inf], dtype=torch.float64, device=values.device)
    return Range(
        torch.where(mask, values, 0.0).sum(),
        mask.sum(),
        torch.cat([bounds[0], empty]).min(),
        torch.cat([bounds[1], -empty]).max(),
    )
