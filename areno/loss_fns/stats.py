"""Statistics that add up exactly over microbatches.

A loss reports :class:`Mean` or :class:`Spread` objects; the engine adds their sums and counts over the optimizer step and
divides once. A plain number in the metrics is averaged with the weights of the loss itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areno.loss_fns.pack import in_float


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


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean of values where mask is true."""
    return Mean(torch.where(mask, in_float(values.detach()), 0.0).sum(), mask.sum())


def masked_spread(values: Tensor, mask: Tensor) -> Spread:
    """Mean and deviation of values where mask is true, summed in float64 so that small deviations survive."""
    kept = torch.where(mask, values.detach().double(), 0.0)
    return Spread(kept.sum(), kept.square().sum(), mask.sum())
