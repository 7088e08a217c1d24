"""Losses that are means over units (tokens, pairs): each unit's numbers are computed once, and a table says what is reported.

A function of this kind returns its quantities by name, ``loss`` among them. :func:`mean_loss` makes a loss of it that reports
under the names of ``areno train`` and the SDK; :func:`with_names` gives the same loss other names.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from areno.loss_fns.pack import DataPack, LossFn, Reduction, reduces_over, reduction_of
from areno.loss_fns.stats import Count, Statistic, masked_mean, masked_range


class Quantity(NamedTuple):
    """A number of each unit."""

    values: Tensor  # one for each [units]
    counts: Tensor  # bool, the units that have one [units]


UnitsFn = Callable[..., dict[str, Quantity]]
Summary = Literal["mean", "range", "count"]
Names = Mapping[str, tuple[str, Summary]]
"""By the reported name: the quantity, and what is reported of it."""


def of_all(values: Tensor) -> Quantity:
    """A number that every unit has."""
    return Quantity(values, torch.ones_like(values, dtype=torch.bool))


def mean_loss(unit: Reduction, names: Names) -> Callable[[UnitsFn], LossFn]:
    """Make a loss, the mean of the quantity ``loss`` over a unit, of a function that returns quantities."""

    def decorate(units: UnitsFn) -> LossFn:
        @functools.wraps(units)
        def loss_fn(*arguments: Any, **options: Any) -> tuple[Tensor, dict[str, Statistic]]:
            return _reported(units(*arguments, **options), names)

        loss_fn.units = units  # type: ignore[attr-defined]
        return reduces_over(unit)(loss_fn)

    return decorate


def with_names(loss_fn: LossFn, names: Names, **options: Any) -> LossFn:
    """A loss made by :func:`mean_loss` with other names of its statistics, and some of its options set."""
    return functools.partial(_renamed, loss_fn=loss_fn, names=names, **options)


@reduces_over(lambda bound: reduction_of(bound["loss_fn"]))
def _renamed(
    data_pack: DataPack, predicted: Tensor, *, loss_fn: Any, names: Names, **options: Any
) -> tuple[Tensor, dict[str, Statistic]]:
    return _reported(loss_fn.units(data_pack, predicted, **options), names)


def _reported(quantities: Mapping[str, Quantity], names: Names) -> tuple[Tensor, dict[str, Statistic]]:
    loss = quantities["loss"]
    statistics = {name: _summary(quantities[quantity], kind) for name, (quantity, kind) in names.items()}
    return loss.values.sum() / loss.counts.sum().clamp(min=1), statistics


def _summary(quantity: Quantity, kind: Summary) -> Statistic:
    if kind == "count":
        return Count(quantity.counts.sum())
    return (masked_mean if kind == "mean" else masked_range)(*quantity)


def means(prefix: str, *quantities: str) -> Names:
    """The mean of each quantity, under its name behind a prefix."""
    return {f"{prefix}{name}": (name, "mean") for name in quantities}
