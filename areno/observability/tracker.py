"""Statistics of a step, gathered where they arise and averaged exactly wherever their parts lie.

Special here: what is kept of a tensor is its sum, count, least and greatest value, in float64, so a step may add to a
statistic any number of times, and statistics of several processes merge exactly: every value weighs the same, wherever
it was. Scopes belong to the thread or the asyncio task that opened them. Importing this module imports no torch.
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
"""Ends the name under which the count of a scalar is exported beside it."""


class ReduceType(StrEnum):
    """What is told of a statistic; all but the first give one number under the statistic's own name."""

    AVG_MIN_MAX = "avg_min_max"
    """``name/avg``, ``name/min`` and ``name/max``."""
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"
    """Mean of plain numbers, with their count under ``name__count``."""
    TIMING = "timing"
    """Seconds: added up inside a process, the slowest process among several."""


Part = tuple[str, float, float, float, float]
"""What one process knows of a statistic: reduce type, sum, count, least, greatest."""
Parts = dict[str, Part]
"""All statistics of a process by name; plain data, so that it may travel as JSON."""


@dataclass(slots=True)
class _Sums:
    """Running sums of one statistic."""

    reduce_type: ReduceType
    total: float = 0.0
    count: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, total: float, count: float, least: float, greatest: float) -> None:
        if not count:
            return
        self.total += total
        self.count += count
        self.least = _extreme(min, self.least, least)
        self.greatest = _extreme(max, self.greatest, greatest)

    def part(self) -> Part:
        return (self.reduce_type.value, self.total, self.count, self.least, self.greatest)


class StatsTracker:
    """Gathers the statistics of one step; ``name`` begins all of their names, ``rollout`` for ``rollout/reward``."""

    def __init__(self, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._sums: dict[str, _Sums] = {}
        self._masks: dict[str, Any] = {}
        self._scopes: ContextVar[tuple[str, ...]] = ContextVar(f"scopes of {name or 'statistics'}", default=())

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put ``name/`` before the names of the statistics of the block; scopes nest."""
        token = self._scopes.set((*self._scopes.get(), name))
        try:
            yield
        finally:
            self._scopes.reset(token)

    def scalar(self, **values: float) -> None:
        """Record plain numbers; of several under one name the mean is told."""
        with self._lock:
            for key, value in values.items():
                number = float(value)
                self._under(self._full(key), ReduceType.SCALAR).add(number, 1.0, number, number)

    def denominator(self, **masks: Any) -> None:
        """Record which elements count (bool tensors) for :meth:`stat`; tells how many. Raises TypeError: one is not bool."""
        import torch

        for key, mask in masks.items():
            tensor = torch.as_tensor(mask)
            if tensor.dtype != torch.bool:
                raise TypeError(f"denominator {key!r} must be a bool tensor, got {tensor.dtype}; use mask.bool()")
            with self._lock:
                self._masks[self._full(key)] = tensor.detach()
                self._push(self._under(self._full(key), ReduceType.SUM), tensor.double(), tensor)

    def stat(self, denominator: str, reduce_type: ReduceType | str | None = None, **tensors: Any) -> None:
        """Record the elements of tensors that a denominator counts.

        Args:
            denominator: name given to :meth:`denominator`, in this scope or one around it; its latest mask holds.
            reduce_type: None is ``AVG_MIN_MAX``.
            tensors: values by name, each of the mask's shape.

        Raises:
            ValueError: no such denominator, another shape, or a name that was recorded with another reduce type.
        """
        import torch

        kind = ReduceType(reduce_type or ReduceType.AVG_MIN_MAX)
        mask = self._mask(denominator)
        for key, values in tensors.items():
            tensor = torch.as_tensor(values).detach()
            if tensor.shape != mask.shape:
                raise ValueError(
                    f"statistic {key!r} has shape {tuple(tensor.shape)} and its denominator {denominator!r} "
                    f"{tuple(mask.shape)}; they must be equal"
                )
            with self._lock:
                self._push(self._under(self._full(key), kind), tensor.double(), mask.to(tensor.device))

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Add the seconds of the block to ``timeperf/{key}``, whatever the scope."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            with self._lock:
                self._under(_join(self._name, "timeperf", key), ReduceType.TIMING).add(seconds, 1.0, seconds, seconds)

    def parts(self, key: str | None = None, reset: bool = True) -> Parts:
        """What this process adds to the statistics, for :func:`merge`; with ``key`` only that statistic or scope."""
        with self._lock:
            taken = [name for name in self._sums if key is None or name == key or name.startswith(f"{key}/")]
            parts = {name: self._sums[name].part() for name in taken}
            if reset:
                for name in taken:
                    del self._sums[name]
                    self._masks.pop(name, None)
        return parts

    def export(self, key: str | None = None, reset: bool = True) -> dict[str, float]:
        """The statistics by full name; arguments are those of :meth:`parts`."""
        return told(self.parts(key, reset))

    def export_all(self, gather: Callable[[Parts], Iterable[Parts]], reset: bool = True) -> dict[str, float]:
        """The statistics over all ranks; ``gather`` is given this one's parts and returns those of all, its own among them."""
        return told(merge(gather(self.parts(reset=reset))))

    def _full(self, key: str) -> str:
        return _join(self._name, *self._scopes.get(), key)

    def _under(self, name: str, kind: ReduceType) -> _Sums:
        sums = self._sums.setdefault(name, _Sums(kind))
        if sums.reduce_type is not kind:
            raise ValueError(f"statistic {name!r} was recorded as {sums.reduce_type}, and now as {kind}; use two names")
        return sums

    def _mask(self, denominator: str) -> Any:
        scopes = self._scopes.get()
        with self._lock:
            for depth in range(len(scopes), -1, -1):
                mask = self._masks.get(_join(self._name, *scopes[:depth], denominator))
                if mask is not None:
                    return mask
        raise ValueError(
            f"denominator {denominator!r} is unknown in scope {'/'.join(scopes) or '(none)'!r}; "
            f"record it first with denominator({denominator}=mask)"
        )

    @staticmethod
    def _push(sums: _Sums, values: Any, mask: Any) -> None:
        """Add the counted elements."""
        import torch

        if values.numel():
            total = torch.where(mask, values, 0.0).sum()
            least = torch.where(mask, values, math.inf).min()
            greatest = torch.where(mask, values, -math.inf).max()
            sums.add(*torch.stack([total, mask.double().sum(), least, greatest]).tolist())


def merge(gathered: Iterable[Parts]) -> Parts:
    """The parts of several processes as one: each value weighs the same. Raises ValueError: their reduce types differ."""
    merged: Parts = {}
    for parts in gathered:
        for name, part in parts.items():
            merged[name] = _merged(name, merged[name], part) if name in merged else part
    return merged


def _merged(name: str, one: Part, other: Part) -> Part:
    if one[0] != other[0]:
        raise ValueError(f"statistic {name!r} is {one[0]} in one process and {other[0]} in another; use two names")
    if one[0] == ReduceType.TIMING:
        return max(one, other, key=lambda part: part[1])
    return (
        one[0],
        one[1] + other[1],
        one[2] + other[2],
        _extreme(min, one[3], other[3]),
        _extreme(max, one[4], other[4]),
    )


def told(parts: Mapping[str, Part]) -> dict[str, float]:
    """The numbers of merged parts by name. A mean, least or greatest value of nothing is left out."""
    numbers: dict[str, float] = {}
    for name, (kind, total, count, least, greatest) in parts.items():
        if kind in (ReduceType.SUM, ReduceType.TIMING):
            numbers[name] = total
        elif not count:
            continue
        elif kind == ReduceType.AVG_MIN_MAX:
            numbers |= {f"{name}/avg": total / count, f"{name}/min": least, f"{name}/max": greatest}
        else:
            numbers[name] = {ReduceType.MIN: least, ReduceType.MAX: greatest}.get(ReduceType(kind), total / count)
            if kind == ReduceType.SCALAR:
                numbers[name + COUNT_SUFFIX] = count
    return numbers


def without_counts(numbers: Mapping[str, float]) -> dict[str, float]:
    """Exported numbers without the counts of scalars, which only help to average."""
    return {name: value for name, value in numbers.items() if not name.endswith(COUNT_SUFFIX)}


def _join(*names: str) -> str:
    return "/".join(name for name in names if name)


def _extreme(pick: Callable[[float, float], float], a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


_trackers: dict[str, StatsTracker] = {}
_trackers_lock = threading.Lock()


def get(name: str = "") -> StatsTracker:
    """The process's tracker of that name, made when first asked for; ``rollout`` and ``eval-rollout`` are the usual ones."""
    with _trackers_lock:
        return _trackers.setdefault(name, StatsTracker(name))


def export_all(gather: Callable[[Parts], Iterable[Parts]] | None = None, reset: bool = True) -> dict[str, float]:
    """The statistics of all named trackers, of all processes where ``gather`` returns their parts."""
    with _trackers_lock:
        trackers = list(_trackers.values())
    parts = {name: part for tracker in trackers for name, part in tracker.parts(reset=reset).items()}
    return told(merge(gather(parts)) if gather is not None else parts)
