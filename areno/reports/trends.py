"""Determines whether a metric changed over a run, or only varied within its noise."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areno.reports.svg import short
from areno.storage.metric_columns import Series

CLEAR = 3.0
"""Number of standard errors above which a change is clear. Noise alone causes a clear rise in about one of 700 runs."""
SHARE = 10
"""In a long run, the first 1 / ``SHARE`` of the steps is compared with the last 1 / ``SHARE``."""
AT_LEAST = 5
"""Minimum number of steps in the mean over the start of a run, and in the mean over its end.

With fewer steps, a single unusual batch could change a mean too much. Exception: if a run is too short for two such means, its
first half is compared with its second half.
"""


@dataclass(frozen=True, slots=True)
class SeriesTrend:
    """A comparison of the start and the end of a series.

    Attributes:
        first: mean over the first ``width`` finite values.
        last: mean over the last ``width`` finite values.
        noise: standard error of ``last - first``.
        width: number of values in each mean.
        peak: highest mean over ``width`` successive values.
        peak_step: step of the last value in the mean ``peak``.
        low: lowest mean over ``width`` successive values.
        low_step: step of the last value in the mean ``low``.
    """

    first: float
    last: float
    noise: float
    width: int
    count: int
    peak: float
    peak_step: int
    low: float
    low_step: int

    @property
    def change(self) -> float:
        """``last - first``."""
        return self.last - self.first

    @property
    def rises(self) -> bool:
        """Whether the end of the series is clearly higher than its start."""
        return self.clear(self.change)

    @property
    def falls(self) -> bool:
        """Whether the end of the series is clearly lower than its start."""
        return self.clear(-self.change)

    def clear(self, change: float) -> bool:
        """Return whether ``change`` is a rise that is larger than noise.

        ``change`` is the difference between two means of the series, such as ``last - first``. Each mean covers
        :attr:`width` values.
        """
        return change > max(CLEAR * self.noise, 1e-9 * max(abs(self.first), abs(self.last)), 1e-12)

    def __str__(self) -> str:
        unit = "value" if self.width == 1 else f"{self.width} steps"
        return f"{short(self.first)} (first {unit}) to {short(self.last)} (last {unit})"


def window(count: int) -> int:
    """Return a window length: the number of values in the mean over the start of a series, and in the mean over its end.

    ``count`` is the length of the series. The result is 0 if ``count`` is below 2.
    """
    return max(count // SHARE, min(AT_LEAST, count // 2))


def trend_of(series: Series, *, noise: float | None = None, width: int | None = None) -> SeriesTrend | None:
    """Return the trend of a series: a comparison of the mean of its first values with the mean of its last values.

    Return None if the series has fewer than two finite values.

    Args:
        noise: standard error of the difference between these two means; None estimates the error from the values. The estimate
            from fewer than four values is infinite.
        width: number of values in each of the two means; None means the result of :func:`window`.
    """
    steps, values = finite(series)
    width = min(width or window(len(values)), len(values) // 2)
    if not width:
        return None
    means = np.convolve(values, np.ones(width) / width, "valid")
    noise = _noise(values, width) if noise is None else noise
    peak, low = int(means.argmax()), int(means.argmin())
    return SeriesTrend(
        first=float(means[0]),
        last=float(means[-1]),
        noise=noise,
        width=width,
        count=len(values),
        peak=float(means[peak]),
        peak_step=int(steps[peak + width - 1]),
        low=float(means[low]),
        low_step=int(steps[low + width - 1]),
    )


def _noise(values: NDArray[np.float64], width: int) -> float:
    """Return the standard error of the difference between two means; infinite for fewer than four values.

    The two means are the mean of the first ``width`` values and the mean of the last ``width`` values. There are two estimates
    of the standard deviation of a value. One uses the differences of successive values, which a trend hardly affects. The other
    is the pooled standard deviation of the first ``width`` and the last ``width`` values. The larger estimate is used, because
    an estimate from few values may be too small. For the same reason, the factor ``1 + 3 / len(values)`` increases the result
    if there are few values.
    """
    if len(values) < 4:
        return math.inf
    ends = np.stack([values[:width], values[-width:]])
    within = math.sqrt(float(ends.var(1).sum()) / 2 * width / max(width - 1, 1))
    deviation = max(float(np.std(np.diff(values))) / math.sqrt(2), within)
    return deviation * math.sqrt(2 / width) * (1 + 3 / len(values))


def finite(series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps with finite values, and these values."""
    steps, values = series.arrays()
    kept = np.isfinite(values)
    return steps[kept], values[kept]


def falls_at_start(series: Series) -> bool:
    """Return whether the first values are clearly higher than the values of the second half.

    The function uses Wilcoxon's rank-sum test with ties. The test also detects a fall during the first few steps.
    :class:`SeriesTrend` may miss such a fall, because it treats the spread of the values in these steps as noise.
    """
    values = finite(series)[1]
    first, later = values[:AT_LEAST], values[len(values) // 2 :]
    if len(later) < 2 * AT_LEAST:
        return False
    _, inverse, counts = np.unique(np.concatenate([first, later]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    count = len(ranks)
    excess = float(ranks[:AT_LEAST].sum()) - AT_LEAST * (count + 1) / 2
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (count * (count - 1))
    return excess > CLEAR * math.sqrt(AT_LEAST * len(later) / 12 * (count + 1 - ties))
