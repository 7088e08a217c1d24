"""Prepares metrics for charts: at most 1,000 points per metric, which include the extremes of the metric."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areno.reports.run_data import KEYS, RunData
from areno.storage.metric_columns import Series

MAX_POINTS = 1000
_SHOWN_STEPS = 100


def metric_name(data: RunData, name: str) -> str | None:
    """Return the recorded name of a metric; None if the run has not recorded the metric.

    ``name`` is the recorded name, or a short name from ``KEYS`` such as ``reward``.
    """
    return name if name in data.metrics else data.metric_of(name) if name in KEYS else None


def curve(data: RunData, name: str, after: str = "", points: int = MAX_POINTS) -> dict[str, Any] | None:
    """Return the points of a series for a chart; None if the series was not recorded.

    Args: after: the value ``next`` that an earlier call has returned. The values of the earlier call are omitted, unless a
    resumed run has replaced these values.

    Returns:
        - ``metric``: the recorded name
        - ``next``: the value of ``after`` for the next request
        - ``start``: number of omitted values
        - ``steps``, ``values`` (null if not finite) and ``minutes`` since the first record: lists with an entry per point
        - ``not_finite``: steps whose values are not finite, limited to the first 100 of these steps
    """
    metric = metric_name(data, name)
    if metric is None:
        return None
    series, times = data.metrics[metric], data.metrics.times
    count = len(series.values)
    records = len(times.values)  # after the count, because another thread may append
    start = min(_known(times, after), count)
    steps, values = np.array(series.steps[start:count]), np.array(series.values[start:count])
    finite = np.isfinite(values)
    shown = extremes(values, points)
    return {
        "metric": metric,
        "next": _cursor(times, count, records),
        "start": start,
        "steps": steps[shown].tolist(),
        "values": [value if flag else None for value, flag in zip(values[shown].tolist(), finite[shown], strict=True)],
        "minutes": np.round(_minutes(times, steps[shown]), 3).tolist(),
        "not_finite": steps[~finite][:_SHOWN_STEPS].tolist(),
    }


def extremes(values: NDArray[np.float64], limit: int) -> NDArray[np.intp]:
    """Return the indices of at most ``limit`` (>= 4) values.

    If there are more than ``limit`` values, they are divided into equally long sections. The indices are then those of
    the first and the last of all values, and of the minimum and maximum of each section.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (limit - 2) // 2 + 1).astype(np.intp)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for start, stop in itertools.pairwise(edges):
        kept.update((int(start + low[start:stop].argmin()), int(start + high[start:stop].argmax())))
    return np.array(sorted(kept))


def _cursor(times: Series, count: int, records: int) -> str:
    """Return a cursor: a string that marks the position after the first ``count`` values of a series.

    The cursor also contains ``records`` (the number of records read from the metrics file) and the time of the last of these
    records. If this record later has a different time, the file was rewritten. The server stores nothing about a cursor.
    Therefore, a client can keep its cursor and the points that it has received even if the server closes the run or restarts.
    """
    return f"{count}/{records}/{times.values[records - 1] if records else 0}"


def _known(times: Series, cursor: str) -> int:
    """Return the ``count`` of a cursor; 0 for a malformed cursor, and for a cursor of a metrics file that was rewritten."""
    try:
        count, records = (int(part) for part in cursor.split("/")[:2])
    except ValueError:
        return 0
    return count if count >= 0 and 0 < records <= len(times.values) and cursor == _cursor(times, count, records) else 0


def _minutes(times: Series, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    count = len(times.values)
    recorded, seconds = np.array(times.steps[:count]), np.array(times.values[:count])  # another thread may append
    known = np.isfinite(seconds)
    if not known.any():
        return np.zeros(len(steps))
    return np.interp(steps, recorded[known], seconds[known] - seconds[known][0]) / 60
