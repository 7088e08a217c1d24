"""Draws curves of several runs as SVG, for papers and web pages.

A curve shows one run, or the mean over runs with different seeds. A curve of several runs has a band from the lowest to
the highest run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from areno.config.options import nearest
from areno.errors import UsageError
from areno.reports.run_data import KEYS, RunData
from areno.reports.svg import Line, line_chart
from areno.storage.metric_columns import Series

X_AXES = ("step", "time", "tokens")
"""Quantities that the x axis can show."""
_TOKENS = ("ppo_actor/n_valid_tokens", "train/sft_target_tokens", "sft/n_valid_tokens")
_UNITS = ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))

Floats = NDArray[np.float64]
Runs = Mapping[str, Sequence[RunData]]
"""Maps the name of each curve in the legend to the runs of the curve. A curve of several runs shows the mean of the runs."""


@dataclass(frozen=True, slots=True)
class PlotLayout:
    """The layout of a plot.

    ``smooth`` is the number of values in the moving mean. ``width`` and ``height`` are the size of one chart in px.
    """

    x: str = "step"
    smooth: int = 1
    title: str = ""
    width: int = 640
    height: int = 360


def metric_names(runs: Sequence[RunData], pattern: str) -> list[str]:
    """Return the metrics that a pattern selects.

    The pattern is a key of ``KEYS`` such as ``reward``, the name of a metric in ``metrics.jsonl``, or a glob for such names.

    Raises UsageError if no run recorded a metric that matches.
    """
    if pattern in KEYS and any(run.metric_of(pattern) for run in runs):
        return [pattern]
    recorded = dict.fromkeys(name for run in runs for name in run.metrics.names)
    names = [name for name in recorded if fnmatchcase(name, pattern)]
    if not names:
        raise UsageError(
            f"--metric {pattern} matches no recorded metric{nearest(pattern, [*KEYS, *recorded])}; use a name in "
            f"metrics.jsonl, or one of: {', '.join(key for key in KEYS if any(run.metric_of(key) for run in runs))}"
        )
    return names


def plot(runs: Runs, metrics: Sequence[str], layout: PlotLayout, size: tuple[str, str] | None = None) -> str:
    """Draw one chart per metric, one below the other, as an SVG document.

    Args:
        runs: the runs of each curve. The curve of several runs is the mean over these runs.
        metrics: names of metrics, or keys of ``KEYS`` such as ``reward``. The chart of a metric omits a curve if there is no
            step at which all runs of the curve recorded the metric.
        layout: x axis, smoothing, title and size of each chart.
        size: width and height of the document with units; None uses the size of the layout in px.

    Raises:
        UsageError: a run lacks the data that ``layout.x`` requires.
    """
    unit, label = _time_unit(runs) if layout.x == "time" else (1.0, layout.x)
    charts = []
    for index, metric in enumerate(metrics):
        chart = line_chart(
            [_line(name, group, metric, layout, unit) for name, group in runs.items() if recorded(group, metric)],
            width=layout.width,
            height=layout.height,
            title=layout.title if index == 0 else "",
            x_label=label,
            y_label=metric,
            heading=True,
            background="#fff",
        )
        place = f'y="{index * layout.height}" width="{layout.width}" height="{layout.height}"'
        charts.append(chart.replace("<svg ", f"<svg {place} ", 1))
    height = layout.height * len(charts)
    shown = size or (f"{layout.width}", f"{height}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{shown[0]}" height="{shown[1]}" '
        f'viewBox="0 0 {layout.width} {height}">{"".join(charts)}</svg>\n'
    )


def recorded(runs: Sequence[RunData], metric: str) -> bool:
    """Return whether all runs of a group recorded a metric at a common step."""
    return bool(set.intersection(*(set(_series(run, metric).steps) for run in runs)))


def _series(run: RunData, metric: str) -> Series:
    return run.series(metric) if metric in KEYS else run.metrics[metric]


def _line(name: str, group: Sequence[RunData], metric: str, layout: PlotLayout, unit: float) -> Line:
    """Return the curve of a group of runs, with only the steps that all of these runs have.

    The curve of several runs is their mean, with a band from the lowest to the highest value.
    """
    curves = [_curve(run, metric, layout) for run in group]
    steps = reduce(np.intersect1d, [steps for steps, _, _ in curves])
    rows = [np.searchsorted(own, steps) for own, _, _ in curves]
    x = np.mean([x[row] for (_, x, _), row in zip(curves, rows, strict=True)], axis=0) / unit
    values = np.array([y[row] for (_, _, y), row in zip(curves, rows, strict=True)])
    if len(group) > 1:
        smooth = np.array([moving(row, layout.smooth)[0] for row in values])
        return Line(name, x, smooth.mean(0), smooth.min(0), smooth.max(0))
    if layout.smooth > 1:
        return Line(name, x, *moving(values[0], layout.smooth))
    return Line(name, x, values[0])


def _curve(run: RunData, metric: str, layout: PlotLayout) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return steps, x values and y values of a metric.

    If a step has several records, the last record is used. Steps without an x value are omitted.
    """
    steps, y = _series(run, metric).arrays()
    steps, last = _last_of_each(steps)
    y = y[last]
    if layout.x == "step":
        return steps, steps.astype(float), y
    at, x = _times(run) if layout.x == "time" else _tokens(run)
    name = run.metric_of(metric) if metric in KEYS else metric
    if layout.x == "tokens" and not run.is_experiment and name is not None and name.startswith("eval/"):
        # These evaluations are numbered by completed steps, so that those after the last step have no step of their own.
        return steps, np.append(0.0, x)[np.searchsorted(at, steps)], y
    kept = np.isin(steps, at)
    return steps[kept], x[np.searchsorted(at, steps[kept])], y[kept]


def _last_of_each(steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    unique, first = np.unique(steps[::-1], return_index=True)
    return unique, len(steps) - 1 - first


def _times(run: RunData) -> tuple[NDArray[np.int64], Floats]:
    """Return the steps, and the seconds from the first record of the run to the last record of each step."""
    steps, times = run.metrics.times.arrays()
    if not np.isfinite(times).all():
        raise UsageError(
            f"--x time needs a time in every record, but {run.path} has records without a time; use --x step"
        )
    unique, last = _last_of_each(steps)
    return unique, times[last] - times[0] if len(times) else times


def _time_unit(runs: Runs) -> tuple[float, str]:
    longest = max((float(_times(run)[1].max(initial=0.0)) for group in runs.values() for run in group), default=0.0)
    return next((size, name) for least, size, name in _UNITS if longest >= least)


def _tokens(run: RunData) -> tuple[NDArray[np.int64], Floats]:
    """Return the steps, and the total number of tokens up to the end of each step.

    For ``areno run``, and for SFT with ``areno train``, only trained tokens are counted. For other algorithms of
    ``areno train``, all generated tokens are counted.
    """
    name = next((name for name in _TOKENS if name in run.metrics), None)
    if name is not None:
        steps, counts = run.metrics[name].arrays()
    else:
        steps, counts = run.metrics["rollout/num_sequences"].arrays()
        lengths = run.metrics["rollout/response_len_mean"].arrays()[1]
        if not len(steps) or len(lengths) != len(steps):
            raise UsageError(
                f"--x tokens needs the number of generated tokens, but {run.path} has no record of it; use --x step"
            )
        counts = np.round(counts * lengths)
    unique, last = _last_of_each(steps)
    return unique, np.cumsum(counts[last])


def moving(values: Floats, size: int) -> tuple[Floats, Floats, Floats]:
    """Return the mean, minimum and maximum of the finite values in a moving window of ``size`` values.

    At both ends of the series, the window has fewer values.
    """
    if not len(values):
        return values, values, values
    before, after = (size - 1) // 2, size // 2
    padded = np.pad(np.where(np.isfinite(values), values, np.nan), (before, after), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, size)
    count = np.isfinite(windows).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(windows, 1) / count
    low = np.where(count, np.where(np.isnan(windows), np.inf, windows).min(1), np.nan)
    high = np.where(count, np.where(np.isnan(windows), -np.inf, windows).max(1), np.nan)
    return mean, low, high
