"""Draws line charts and stacked bars as SVG, for pages and for files.

A chart contains its colors and fonts, so an ``.svg`` file can be displayed without a style sheet. A page can override the
colors with CSS rules, for example for a dark scheme. The elements have classes such as ``axis``, ``s0`` to ``s7`` for lines,
and ``f0`` to ``f7`` for filled shapes. The digit is the index in ``COLORS``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

from areno.observability.chart import printable

MAX_POINTS = 500
"""Maximum number of points that a chart draws per line.

A line with more points is divided into intervals, and only the lowest and the highest point of each interval are drawn.
"""
COLORS = ("#0072b2", "#d55e00", "#00805d", "#b0508c", "#a66f00", "#3b7dd8", "#5c5c5c", "#8a4fbf")
"""Colors of the lines, which are distinguishable for color-blind readers and readable on white."""
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_FONT = "system-ui, sans-serif"
_SIZE = 12  # font size in px
_CHAR = 6.6  # average width of a character, in px
_MAX_MARKS = 40  # marks of values that are not finite

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """A series to draw. ``low`` and ``high`` bound a band around the line.

    Non-finite values interrupt the line, and are marked by crosses on the horizontal axis.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data coordinates to the canvas."""

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at_x(self, values: Floats) -> Floats:
        return self.left + (values - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def at_y(self, values: Floats) -> Floats:
        return self.bottom - (values - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)


def line_chart(
    lines: Sequence[Line],
    *,
    width: int = 640,
    height: int = 320,
    title: str = "",
    x_label: str = "step",
    y_label: str = "",
    heading: bool = False,
    background: str = "",
) -> str:
    """Draw lines as one ``<svg>`` element.

    Args:
        lines: series, whose lengths may differ. An empty series appears only in the legend.
        width: canvas width in px. The element scales to the width of its container.
        height: canvas height in px.
        title: title of the chart for screen readers. With ``heading``, the title is also drawn.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
        heading: whether the title is drawn.
        background: color of the canvas; empty means transparent.
    """
    curves = [_thinned(line) for line in lines]
    top = 10.0 + (20 if heading and title else 0)
    legend, top = _legend([line.name for line in lines], width, top) if len(lines) > 1 else ([], top)
    y_range = _range(np.concatenate([np.concatenate(curve[1:]) for curve in curves] or [np.zeros(0)]))
    x_range = _range(np.concatenate([curve[0] for curve in curves] or [np.zeros(0)]), margin=0.0)
    y_ticks = _ticks(*y_range, 5)
    left = 14 + _CHAR * max(len(_label(tick, y_ticks)) for tick in y_ticks) + (18 if y_label else 0)
    frame = _Frame(left, top, width - 12, height - (38 if x_label else 24), x_range, y_range)
    body = [f'<rect width="{width}" height="{height}" fill="{escape(background)}"/>'] if background else []
    if heading and title:
        body.append(_text(width / 2, 18, title, anchor="middle", bold=True))
    body += [*legend, *_axes(frame, y_ticks, x_label, y_label)]
    for index, curve in enumerate(curves):
        body += _curve(frame, index, *curve)
    body += _non_finite(frame, lines)
    described = "; ".join(filter(None, [title, *map(_described, lines)]))
    return _svg(width, height, described, body)


def stacked_bar(parts: Sequence[tuple[str, float]], *, width: int = 640, unit: str = "s", title: str = "") -> str:
    """Draw the positive amounts as one stacked horizontal bar with a legend, as an ``<svg>`` element."""
    parts = [(name, amount) for name, amount in parts if amount > 0 and math.isfinite(amount)]
    total = sum(amount for _, amount in parts) or 1.0
    labels = [f"{name} {short(amount)} {unit} ({amount / total:.0%})" for name, amount in parts]
    legend, bottom = _legend(labels, width, 46.0, filled=True)
    body, start = legend, 0.0
    for index, (_, amount) in enumerate(parts):
        size = amount / total * width
        body.append(
            f'<rect class="f{index % len(COLORS)}" x="{start:.1f}" y="8" width="{max(size - 1, 0.5):.1f}" height="28" '
            f'fill="{COLORS[index % len(COLORS)]}"><title>{_safe(labels[index])}</title></rect>'
        )
        start += size
    return _svg(width, round(bottom), "; ".join(filter(None, [title, *labels])), body)


def short(value: float) -> str:
    """Format a number with at most three significant digits. A whole number below a million is written in full."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def _svg(width: int, height: int, description: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{_safe(description)}" font-family="{_FONT}" font-size="{_SIZE}">{"".join(body)}</svg>'
    )


def _safe(text: str) -> str:
    return escape(printable(text).replace("\n", " "))


def _style(index: int) -> tuple[str, str]:
    """Return the color and the dash attribute of a series. If two series share a color, their dashes differ."""
    dash = _DASHES[(index + index // len(COLORS)) % len(_DASHES)]
    return COLORS[index % len(COLORS)], f' stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, turn: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text class="text" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333"{weight}{turned}>'
        f"{_safe(text)}</text>"
    )


def _legend(names: Sequence[str], width: int, top: float, filled: bool = False) -> tuple[list[str], float]:
    """Draw a legend in rows below ``top``. Return the legend and the y coordinate of its lower edge."""
    parts, x, y = [], 8.0, top + 8
    for index, name in enumerate(names):
        size = 34 + _CHAR * len(name)
        if x > 8 and x + size > width:
            x, y = 8.0, y + 18
        color, dash = _style(index)
        if filled:
            mark = f'<rect class="f{index % len(COLORS)}" x="{x:.1f}" y="{y - 5:.1f}" width="18" height="10" fill="{color}"/>'
        else:
            mark = (
                f'<path class="s{index % len(COLORS)}" d="M{x:.1f} {y:.1f}h22" stroke="{color}" stroke-width="2"{dash} '
                'fill="none"/>'
            )
        parts += [mark, _text(x + 26, y + 4, name)]
        x += size + 8
    return parts, y + 16


def _arrays(line: Line) -> tuple[Floats, Floats, Floats, Floats]:
    y = np.asarray(line.y, float)
    columns = (line.x, y, y if line.low is None else line.low, y if line.high is None else line.high)
    x, y, low, high = (np.where(np.isfinite(values := np.asarray(column, float)), values, np.nan) for column in columns)
    return x, y, low, high


def _thinned(line: Line) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the points to draw.

    A long line is divided into intervals. The lowest and the highest point of each interval, and the first and the last point
    of the line, are drawn.
    """
    x, y, low, high = _arrays(line)
    count = len(x)
    if count <= MAX_POINTS:
        return x, y, low, high
    intervals = (MAX_POINTS - 2) // 2
    size = -(-count // intervals)
    padded = [
        np.pad(column, (0, intervals * size - count), constant_values=np.nan).reshape(intervals, size)
        for column in (y, low, high)
    ]
    starts = np.arange(intervals) * size
    lowest = starts + np.where(np.isnan(padded[0]), np.inf, padded[0]).argmin(1)
    highest = starts + np.where(np.isnan(padded[0]), -np.inf, padded[0]).argmax(1)
    kept = np.unique(np.concatenate([[0, count - 1], lowest, highest]))
    kept = kept[kept < count]
    least = np.where(np.isnan(padded[1]), np.inf, padded[1]).min(1)[kept // size]
    most = np.where(np.isnan(padded[2]), -np.inf, padded[2]).max(1)[kept // size]
    bounds = (np.where(np.isfinite(column), column, np.nan) for column in (least, most))
    return (x[kept], y[kept], *bounds)  # type: ignore[return-value]


def _range(values: Floats, margin: float = 0.06) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        spread = abs(low) * 0.1
        return (low - spread, high + spread) if spread > 1e-300 else (0.0, 1.0)
    spread = (high - low) * margin
    return low - spread, high + spread


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between two bounds."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def _label(tick: float, ticks: Sequence[float]) -> str:
    """Format a tick with enough digits to distinguish the ticks."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(tick) or 1.0
    largest = max(map(abs, ticks)) or 1.0
    if largest >= 1e6 or largest < 1e-3:
        return f"{tick:.{max(0, math.ceil(math.log10(largest / step)))}e}" if tick else "0"
    return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _axes(frame: _Frame, y_ticks: Sequence[float], x_label: str, y_label: str) -> Iterator[str]:
    left, right, bottom = frame.left, frame.right, frame.bottom
    for tick, y in zip(y_ticks, frame.at_y(np.array(y_ticks)), strict=True):
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd" fill="none"/>'
        yield _text(left - 6, y + 4, _label(tick, y_ticks), anchor="end")
    x_ticks = _ticks(*frame.x, max(2, int((right - left) / 90)))
    if all(tick == round(tick) for tick in frame.x):
        x_ticks = sorted({float(round(tick)) for tick in x_ticks if frame.x[0] <= round(tick) <= frame.x[1]}) or x_ticks
    for tick, x in zip(x_ticks, frame.at_x(np.array(x_ticks)), strict=True):
        yield f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4" stroke="#777" fill="none"/>'
        yield _text(x, bottom + 17, _label(tick, x_ticks), anchor="middle")
    yield f'<path class="axis" d="M{left:.1f} {frame.top:.1f}V{bottom:.1f}H{right:.1f}" stroke="#777" fill="none"/>'
    if x_label:
        yield _text((left + right) / 2, bottom + 33, x_label, anchor="middle")
    if y_label:
        yield _text(14, (frame.top + bottom) / 2, y_label, anchor="middle", turn=True)


def _curve(frame: _Frame, index: int, x: Floats, y: Floats, low: Floats, high: Floats) -> Iterator[str]:
    """Draw the band and the line of a series. Isolated points, and all points of a short series, are also drawn as circles."""
    color, dash = _style(index)
    name, at_x, at_y = index % len(COLORS), frame.at_x(x), frame.at_y(y)
    finite = np.isfinite(x) & np.isfinite(y)
    runs = np.split(np.arange(len(x)), np.flatnonzero(np.diff(finite.astype(int))) + 1)
    runs = [run for run in runs if len(run) and finite[run[0]]]
    tops, bottoms = frame.at_y(high), frame.at_y(low)
    for run in runs:
        bound = run[np.isfinite(tops[run]) & np.isfinite(bottoms[run])]
        if len(bound) > 1 and np.any(tops[bound] != bottoms[bound]):
            around = [
                *zip(at_x[bound], tops[bound], strict=True),
                *zip(at_x[bound][::-1], bottoms[bound][::-1], strict=True),
            ]
            yield f'<path class="band f{name}" d="{_path(around)}Z" fill="{color}" fill-opacity="0.18" stroke="none"/>'
    drawn = "".join(_path(zip(at_x[run], at_y[run], strict=True)) for run in runs)
    if drawn:
        yield (
            f'<path class="s{name}" d="{drawn}" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"{dash} '
            'fill="none"/>'
        )
    for run in runs:
        for point in run if len(run) == 1 or finite.sum() <= 30 else ():
            yield f'<circle class="f{name}" cx="{at_x[point]:.1f}" cy="{at_y[point]:.1f}" r="2.5" fill="{color}"/>'


def _path(points: "zip[tuple[float, float]] | Sequence[tuple[float, float]]") -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _non_finite(frame: _Frame, lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        x = np.asarray(line.x, float)[~np.isfinite(np.asarray(line.y, float))]
        for place in frame.at_x(x[:: max(1, -(-len(x) // _MAX_MARKS))]):
            yield (
                f'<path class="bad" d="M{place - 3:.1f} {frame.bottom - 7:.1f}l6 6m0 -6l-6 6" stroke="#c00" '
                'stroke-width="1.8" fill="none"><title>not finite</title></path>'
            )


def _described(line: Line) -> str:
    x, values, _, _ = _arrays(line)
    places = np.flatnonzero(np.isfinite(values))
    if not len(places):
        return f"{line.name}: no values"
    first, last = places[0], places[-1]
    text = f"{line.name}: {short(values[first])} at {short(x[first])}, {short(values[last])} at {short(x[last])}"
    text += f", lowest {short(np.nanmin(values))}, highest {short(np.nanmax(values))}"
    missing = len(values) - len(places)
    return text + (f", {missing} not finite" if missing else "")
