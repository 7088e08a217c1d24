"""Reads ``metrics.jsonl`` into columns, and follows the file while a run writes it.

Ten thousand steps of sixty numbers take about 10 MB of memory, and a second to read.
"""

from __future__ import annotations  # subscripts of `array` exist from Python 3.12 on

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from areno.storage.json_lines import NON_FINITE, as_float, parse_record


@dataclass(slots=True)
class Series:
    """The values of one metric, with their steps, in file order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return steps and values, each [records]."""
        return np.array(self.steps), np.array(self.values)

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]


class MetricColumns:
    """The metrics of a run by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.series: dict[str, Series] = {}
        self.times = Series()
        self._read = 0
        self.update()

    def __contains__(self, name: str) -> bool:
        return name in self.series

    def __getitem__(self, name: str) -> Series:
        """Return the series of a metric; empty if it was never recorded."""
        return self.series.get(name) or Series()

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they first appear."""
        return list(self.series)

    @property
    def last_step(self) -> int:
        """Step of the newest record; -1 before the first."""
        return self.times.steps[-1] if self.times.steps else -1

    def update(self) -> bool:
        """Read complete new lines and return whether there were any. Reads the whole file again if a resume truncated it."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size < self._read:
            self.series, self.times, self._read = {}, Series(), 0
        if size == self._read:
            return False
        with open(self.path, "rb") as file:
            file.seek(self._read)
            start = self._read
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._add(line)
        return self._read > start

    def _add(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            return
        step = record.pop("step")
        self.times.steps.append(step)
        self.times.values.append(as_float(record.pop("time", math.nan)))
        for name, value in record.items():
            number = NON_FINITE.get(value) if isinstance(value, str) else value
            if not isinstance(number, int | float):
                continue
            number = number if isinstance(number, float) else as_float(number)
            series = self.series.get(name)
            if series is None:  # stored with its first value, because other threads may read the series meanwhile
                self.series[name] = Series(array("q", [step]), array("d", [number]))
            else:
                series.steps.append(step)
                series.values.append(number)
