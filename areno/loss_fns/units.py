"""Losses that are means over units (tokens or pairs), and the tables that name the statistics of these losses.

A unit function returns per-unit quantities by name, including ``loss``. :func:`mean_loss` turns a unit function into a
loss that also reports statistics. The names of these statistics are the names that ``areno train`` and the SDK report.
``areno run`` reports the statistics under other names, which :func:`with_names` sets.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from areno.loss_fns.loss_interface import DataPack, LossFn, Reduction, reduces_over, reduction_of
from areno.loss_fns.stats import Count, Statistic, masked_mean, masked_range


class Quantity(NamedTuple):
    """A quantity with one number per unit. A unit is a token, a sequence or a pair."""

    values: Tensor  # [units]
    counts: Tensor  # bool, units that have a value [units]


UnitsFn = Callable[..., dict[str, Quantity]]
Summary = Literal["mean", "range", "count"]
Names = Mapping[str, tuple[str, Summary]]
"""Maps the name of each reported statistic to a pair: a quantity and a summary.

The quantity is a key of the dictionary that a unit function (:data:`UnitsFn`) returns. The summary of its values is ``mean``,
``range`` (mean, minimum and maximum) or ``count`` (number of units with a value; see :class:`Quantity`).
"""


def of_all(values: Tensor) -> Quantity:
    """Create a :class:`Quantity` in which every unit (token, sequence or pair) has a value."""
    return Quantity(values, torch.ones_like(values, dtype=torch.bool))


def mean_loss(unit: Reduction, names: Names) -> Callable[[UnitsFn], LossFn]:
    """Create a decorator that turns a unit function, which returns a dictionary of quantities, into a loss.

    The loss is the mean of the quantity named ``loss``, which has one number per token, sequence or pair (``unit``). The loss
    also reports a statistic for each entry of ``names`` (see :data:`Names`).
    """

    def decorate(units: UnitsFn) -> LossFn:
        @functools.wraps(units)
        def loss_fn(*arguments: Any, **options: Any) -> tuple[Tensor, dict[str, Statistic]]:
            return _reported(units(*arguments, **options), names)

        loss_fn.units = units  # type: ignore[attr-defined]
        return reduces_over(unit)(loss_fn)

    return decorate


def with_names(loss_fn: LossFn, names: Names, **options: Any) -> LossFn:
    """Bind options to a loss made by :func:`mean_loss`, and report the loss's statistics under other names.

    ``names`` maps the new names to quantities (see :data:`Names`). Names of quantities that the loss does not
    compute are ignored.
    """
    return functools.partial(_renamed, loss_fn=loss_fn, names=names, **options)


@reduces_over(lambda bound: reduction_of(bound["loss_fn"]))
def _renamed(
    data_pack: DataPack, predicted: Tensor, *, loss_fn: Any, names: Names, **options: Any
) -> tuple[Tensor, dict[str, Statistic]]:
    quantities = loss_fn.units(data_pack, predicted, **options)
    return _reported(quantities, {name: source for name, source in names.items() if source[0] in quantities})


def _reported(quantities: Mapping[str, Quantity], names: Names) -> tuple[Tensor, dict[str, Statistic]]:
    loss = quantities["loss"]
    statistics = {name: _summary(quantities[quantity], kind) for name, (quantity, kind) in names.items()}
    return loss.values.sum() / loss.counts.sum().clamp(min=1), statistics


def _summary(quantity: Quantity, kind: Summary) -> Statistic:
    if kind == "count":
        return Count(quantity.counts.sum())
    return (masked_mean if kind == "mean" else masked_range)(*quantity)


def means(prefix: str, *quantities: str) -> Names:
    """Return a :data:`Names` mapping that reports the mean of each quantity under ``prefix`` plus the quantity's name.

    For example, with the prefix ``rm_``, the mean of the quantity ``loss`` is reported as ``rm_loss``.
    """
    return {f"{prefix}{name}": (name, "mean") for name in quantities}
