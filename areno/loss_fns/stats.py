"""Statistics that are aggregated exactly over microbatches.

A loss reports statistics as objects of the classes in this module, such as :class:`Mean`. The engine merges the parts of
these objects (sums, counts, minima and maxima) over the optimizer step and all ranks, and converts the result to scalars. If a
loss reports a plain number instead, the engine averages it over the microbatches. The weight of a microbatch is the same as for
the loss: its share of the step's tokens, sequences or pairs.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from areno.errors import UsageError
from areno.loss_fns.loss_interface import LossFn, in_float, name_of

Parts = list[float]


@dataclass(frozen=True, slots=True)
class Mean:
    """Sum and count of the values of a statistic.

    The engine reports the mean (the sum divided by the count) under the key of the statistic in the metrics of the loss.
    """

    total: Tensor
    count: Tensor

    def detached(self) -> Mean:
        """Return a copy without gradient."""
        return Mean(self.total.detach(), self.count)


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, sum and sum of squares of a quantity, reported as ``<name>_mean`` and ``<name>_std`` (population std)."""

    total: Tensor
    square: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """Count, sum, minimum and maximum of a quantity, reported as ``<name>/avg``, ``<name>/min`` and ``<name>/max``.

    If there are no values, no scalars are reported.
    """

    total: Tensor
    count: Tensor
    minimum: Tensor
    maximum: Tensor


@dataclass(frozen=True, slots=True)
class Count:
    """A count, which the engine sums over all microbatches of the optimizer step."""

    total: Tensor


@dataclass(frozen=True, slots=True)
class TokenFlags:
    """One flag (bool) for each token of a microbatch, except for the first token of each sequence.

    Flags are not reported as scalars. The statistic ``clipped`` of a loss marks the tokens whose gradient was removed by
    clipping. ``samples.jsonl`` contains these flags.
    """

    values: Tensor


Statistic = Mean | Spread | Range | Count


def parts_of(statistic: Statistic) -> tuple[str, list[Tensor]]:
    """Return the kind of a statistic, such as ``mean``, and its tensors, such as sum and count."""
    return type(statistic).__name__.lower(), [getattr(statistic, entry.name) for entry in fields(statistic)]


def merge_parts(kind: str, left: Parts, right: Parts) -> Parts:
    """Merge the parts of one statistic (such as sum and count) from two microbatches or ranks."""
    merged = [a + b for a, b in zip(left, right, strict=True)]
    if kind == "range":
        merged[2:] = [min(left[2], right[2]), max(left[3], right[3])]
    return merged


def scalars_of(name: str, kind: str, parts: Parts) -> dict[str, float]:
    """Return the scalars to report for a statistic."""
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
    """Return the mean of the values under the mask."""
    return Mean(torch.where(mask, in_float(values.detach()), 0.0).sum(), mask.sum())


def masked_spread(values: Tensor, mask: Tensor) -> Spread:
    """Return mean and standard deviation of the values under the mask. Summation in float64 keeps small deviations accurate."""
    masked = torch.where(mask, values.detach().double(), 0.0)
    return Spread(masked.sum(), masked.square().sum(), mask.sum())


def masked_range(values: Tensor, mask: Tensor) -> Range:
    """Return mean, minimum and maximum of the values under the mask.

    If no entry of the mask is True, the minimum is inf and the maximum is -inf.
    """
    values = values.detach().double()
    bounds = [torch.where(mask, values, bound) for bound in (torch.inf, -torch.inf)]
    empty = torch.tensor([torch.inf], dtype=torch.float64, device=values.device)
    return Range(
        torch.where(mask, values, 0.0).sum(),
        mask.sum(),
        torch.cat([bounds[0], empty]).min(),
        torch.cat([bounds[1], -empty]).max(),
    )


def checked_output(output: Any, loss_fn: LossFn) -> tuple[Tensor, dict[str, Any]]:
    """Split the output of a loss function into loss and statistics. Raise UsageError if the output is invalid."""
    parts = output if isinstance(output, tuple) else (output, {})
    if len(parts) != 2 or not isinstance(parts[0], Tensor) or parts[0].numel() != 1 or not isinstance(parts[1], dict):
        raise UsageError(
            f"the loss {name_of(loss_fn)} returned {_shape_of(output)}; return a tensor of one element, or a tuple of such a "
            "tensor and a dictionary of statistics"
        )
    for name, value in parts[1].items():
        if not isinstance(value, Statistic | TokenFlags) and not _is_number(value):
            raise UsageError(
                f"the loss {name_of(loss_fn)} returned {_shape_of(value)} as the statistic {name!r}; return a number, a tensor "
                "of one element or a statistic of areno.loss_fns.stats"
            )
    return parts


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()


def _shape_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shape_of, value))})"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
