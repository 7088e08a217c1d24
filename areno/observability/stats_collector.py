"""Collects the statistics of a step, and merges the statistics of several processes.

A step may record values of a statistic any number of times. Only the sum, count, minimum and maximum of these values are kept,
in float64. When the statistics of several processes are merged, every value has equal weight. A scope is a ``with`` block that
adds a prefix to the names of statistics (:meth:`StatsTracker.scope`). The prefix applies only in the thread or asyncio task
that entered the block, and in tasks started inside the block. Importing this module does not import torch.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

COUNT_SUFFIX = "__count"
"""Suffix of exported names: ``name__count`` is the number of values of the scalar ``name``."""


class ReduceType(StrEnum):
    """How the values of a statistic are reduced. All types but ``AVG_MIN_MAX`` export one number under the statistic's name."""

    AVG_MIN_MAX = "avg_min_max"
    """Mean, minimum and maximum, exported as ``name/avg``, ``name/min`` and ``name/max``."""
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"
    """Mean of the numbers that :meth:`StatsTracker.scalar` recorded. Their count is exported as ``name__count``."""
    TIMING = "timing"
    """Sum of the recorded durations, in seconds. Of the sums of several processes, the largest is exported."""


Part = tuple[str, float, float, float, float]
"""The contribution of a process to a statistic: reduce type, sum, count, minimum and maximum."""
Parts = dict[str, Part]
"""Maps names of statistics to :data:`Part` tuples, which can be sent as JSON."""


@dataclass(slots=True)
class _Accumulator:
    reduce_type: ReduceType
    total: float = 0.0
    count: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, total: float, count: float, minimum: float, maximum: float) -> None:
        if not count:
            return
        self.total += total
        self.count += count
        self.minimum = _extreme(min, self.minimum, minimum)
        self.maximum = _extreme(max, self.maximum, maximum)

    def part(self) -> Part:
        return (self.reduce_type.value, self.total, self.count, self.minimum, self.maximum)


class StatsTracker:
    """Collects the statistics of one step.

    ``name`` is the prefix of the names of all statistics, such as ``rollout`` in ``rollout/reward``.
    """

    def __init__(self, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._accumulators: dict[str, _Accumulator] = {}
        self._masks: dict[str, Any] = {}
        self._scopes: ContextVar[tuple[str, ...]] = ContextVar(f"scopes of {name or 'statistics'}", default=())

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Add the prefix ``name/`` to the names of the statistics that the block records. Scopes can be nested."""
        token = self._scopes.set((*self._scopes.get(), name))
        try:
            yield
        finally:
            self._scopes.reset(token)

    def scalar(self, **values: float) -> None:
        """Record one number per name. The mean of all numbers with the same name is exported."""
        with self._lock:
            for key, value in values.items():
                number = float(value)
                self._accumulator(self._full_name(key), ReduceType.SCALAR).add(number, 1.0, number, number)

    def denominator(self, **masks: Any) -> None:
        """Record bool masks, by which :meth:`stat` selects elements. The number of True elements of a mask becomes a
        statistic.

        Raises TypeError if a mask is not bool.
        """
        import torch

        for key, mask in masks.items():
            tensor = torch.as_tensor(mask)
            if tensor.dtype != torch.bool:
                raise TypeError(f"the mask {key!r} must be a bool tensor, but is {tensor.dtype}; pass mask.bool()")
            with self._lock:
                self._masks[self._full_name(key)] = tensor.detach()
                self._add(self._accumulator(self._full_name(key), ReduceType.SUM), tensor.double(), tensor)

    def stat(self, denominator: str, reduce_type: ReduceType | str | None = None, **tensors: Any) -> None:
        """Record those elements of the tensors for which a mask is True.

        Args:
            denominator: name of a mask that :meth:`denominator` recorded in the current scope or in an enclosing scope. If
                several scopes have a mask of this name, the mask of the innermost scope is used. If a scope recorded several
                masks of this name, the latest is used.
            reduce_type: how to reduce the selected elements; None means ``AVG_MIN_MAX``.
            tensors: the values to record. The keyword is the name of the statistic; the tensor has the shape of the mask.

        Raises:
            ValueError: the denominator is unknown, a tensor does not have the shape of the mask, or a name was recorded with a
                different reduce type.
        """
        import torch

        kind = ReduceType(reduce_type or ReduceType.AVG_MIN_MAX)
        mask = self._mask(denominator)
        for key, values in tensors.items():
            tensor = torch.as_tensor(values).detach()
            if tensor.shape != mask.shape:
                raise ValueError(
                    f"the values of statistic {key!r} have shape {tuple(tensor.shape)}, but their mask {denominator!r} has "
                    f"shape {tuple(mask.shape)}; pass values and a mask of the same shape"
                )
            with self._lock:
                self._add(self._accumulator(self._full_name(key), kind), tensor.double(), mask.to(tensor.device))

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Add the duration of the ``with`` block, in seconds, to the statistic ``timeperf/{key}``.

        A :meth:`scope` adds no prefix to this name.
        """
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            with self._lock:
                name = _join(self._name, "timeperf", key)
                self._accumulator(name, ReduceType.TIMING).add(seconds, 1.0, seconds, seconds)

    def parts(self, key: str | None = None, reset: bool = True) -> Parts:
        """Return the contributions of this process to statistics, as input for :func:`merge`.

        ``key`` selects the statistic with this full name, and all statistics whose full names begin with ``{key}/``. None
        selects all statistics. With ``reset``, the tracker then forgets the selected statistics.
        """
        with self._lock:
            names = [name for name in self._accumulators if key is None or name == key or name.startswith(f"{key}/")]
            parts = {name: self._accumulators[name].part() for name in names}
            if reset:
                for name in names:
                    del self._accumulators[name]
                    self._masks.pop(name, None)
        return parts

    def export(self, key: str | None = None, reset: bool = True) -> dict[str, float]:
        """Return the statistics of this process, with full names as keys. The arguments are those of :meth:`parts`."""
        return reduced(self.parts(key, reset))

    def export_all(self, gather: Callable[[Parts], Iterable[Parts]], reset: bool = True) -> dict[str, float]:
        """Return the statistics over all ranks. ``gather`` takes this rank's ``Parts``, and returns those of all ranks."""
        return reduced(merge(gather(self.parts(reset=reset))))

    def _full_name(self, key: str) -> str:
        return _join(self._name, *self._scopes.get(), key)

    def _accumulator(self, name: str, kind: ReduceType) -> _Accumulator:
        accumulator = self._accumulators.setdefault(name, _Accumulator(kind))
        if accumulator.reduce_type is not kind:
            raise ValueError(
                f"statistic {name!r} was first recorded with reduce type {accumulator.reduce_type}, but now with {kind}; "
                "use a different name for each reduce type"
            )
        return accumulator

    def _mask(self, denominator: str) -> Any:
        scopes = self._scopes.get()
        with self._lock:
            for depth in range(len(scopes), -1, -1):
                mask = self._masks.get(_join(self._name, *scopes[:depth], denominator))
                if mask is not None:
                    return mask
        raise ValueError(
            f"denominator {denominator!r} is unknown in scope {'/'.join(scopes) or '(none)'!r}; "
            f"first call denominator({denominator}=mask), where mask is a bool tensor that selects the elements to average"
        )

    @staticmethod
    def _add(accumulator: _Accumulator, values: Any, mask: Any) -> None:
        import torch

        if values.numel():
            total = torch.where(mask, values, 0.0).sum()
            minimum = torch.where(mask, values, math.inf).min()
            maximum = torch.where(mask, values, -math.inf).max()
            accumulator.add(*torch.stack([total, mask.double().sum(), minimum, maximum]).tolist())


def merge(gathered: Iterable[Parts]) -> Parts:
    """Merge the statistics of several processes. In a mean, every recorded value has equal weight.

    Raises ValueError if a statistic has different reduce types in two processes.
    """
    merged: Parts = {}
    for parts in gathered:
        for name, part in parts.items():
            merged[name] = _merged(name, merged[name], part) if name in merged else part
    return merged


def _merged(name: str, one: Part, other: Part) -> Part:
    if one[0] != other[0]:
        raise ValueError(
            f"statistic {name!r} has reduce type {one[0]} in one process, but {other[0]} in another process; use a different "
            "name for each reduce type"
        )
    if one[0] == ReduceType.TIMING:
        return max(one, other, key=lambda part: part[1])
    return (
        one[0],
        one[1] + other[1],
        one[2] + other[2],
        _extreme(min, one[3], other[3]),
        _extreme(max, one[4], other[4]),
    )


def reduced(parts: Mapping[str, Part]) -> dict[str, float]:
    """Compute the numbers to export, such as means, from ``parts``. Return a dictionary of names and values.

    A sum or a timing without values is 0. Other statistics without values are omitted.
    """
    numbers: dict[str, float] = {}
    for name, (kind, total, count, minimum, maximum) in parts.items():
        if kind in (ReduceType.SUM, ReduceType.TIMING):
            numbers[name] = total
        elif not count:
            continue
        elif kind == ReduceType.AVG_MIN_MAX:
            numbers |= {f"{name}/avg": total / count, f"{name}/min": minimum, f"{name}/max": maximum}
        else:
            numbers[name] = {ReduceType.MIN: minimum, ReduceType.MAX: maximum}.get(ReduceType(kind), total / count)
            if kind == ReduceType.SCALAR:
                numbers[name + COUNT_SUFFIX] = count
    return numbers


def without_counts(numbers: Mapping[str, float]) -> dict[str, float]:
    """Omit the counts ``name__count`` (see :data:`COUNT_SUFFIX`), which are needed only for averaging several means."""
    return {name: value for name, value in numbers.items() if not name.endswith(COUNT_SUFFIX)}


def _join(*names: str) -> str:
    return "/".join(name for name in names if name)


def _extreme(pick: Callable[[float, float], float], a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


_trackers: dict[str, StatsTracker] = {}
_trackers_lock = threading.Lock()


def get(name: str = "") -> StatsTracker:
    """Return the process's tracker of this name, such as ``rollout`` or ``eval-rollout``. It is created if necessary."""
    with _trackers_lock:
        return _trackers.setdefault(name, StatsTracker(name))


def export_all(gather: Callable[[Parts], Iterable[Parts]] | None = None, reset: bool = True) -> dict[str, float]:
    """Return the statistics of all trackers of this process. With ``gather``, return the statistics over all processes."""
    with _trackers_lock:
        trackers = list(_trackers.values())
    parts = {name: part for tracker in trackers for name, part in tracker.parts(reset=reset).items()}
    return reduced(merge(gather(parts)) if gather is not None else parts)
