"""Charts show the numbers that they were drawn from, and are valid SVG for any numbers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from areno.reports.svg import MAX_POINTS, Line, line_chart, stacked_bar
from tests.reports.charts import elements, parsed, points, scale


def test_a_line_goes_through_its_values():
    values = [0.1, 0.9, 0.4, 0.7, 0.65]
    svg = line_chart([Line("reward", range(5), values)], title="Reward")
    (line,) = elements(svg, "path", "s0")
    x_of, y_of = scale(svg)
    drawn = points(line.get("d"))
    assert [x_of(x) for x, _ in drawn] == pytest.approx([0, 1, 2, 3, 4], abs=0.02)
    assert [y_of(y) for _, y in drawn] == pytest.approx(values, abs=0.003)


def test_a_chart_is_described_for_screen_readers():
    svg = line_chart([Line("a", range(3), [1, 5, 2]), Line("b", range(3), [0.25, math.nan, 0.5])], title="Two")
    root = parsed(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == (
        "Two; a: 1 at 0, 2 at 2, lowest 1, highest 5; b: 0.25 at 0, 0.5 at 2, lowest 0.25, highest 0.5, 1 not finite"
    )


def test_a_band_reaches_from_low_to_high():
    low, high = [0.0, 0.1, 0.2], [1.0, 0.9, 1.2]
    svg = line_chart([Line("r", range(3), [0.5, 0.5, 0.6], low, high)])
    (band,) = elements(svg, "path", "band")
    _, y_of = scale(svg)
    assert [y_of(y) for _, y in points(band.get("d"))] == pytest.approx([*high, *low[::-1]], abs=0.01)


def test_values_that_are_not_finite_leave_a_gap_and_are_marked():
    svg = line_chart([Line("r", range(7), [1, 2, math.nan, math.inf, 3, math.nan, 4])])
    (line,) = elements(svg, "path", "s0")
    assert line.get("d").count("M") == 3
    assert len(elements(svg, "path", "bad")) == 3
    assert len(elements(svg, "circle")) == 4


@pytest.mark.parametrize("steps", [501, 1000, 9_999, 100_000])
def test_long_lines_keep_their_extremes_and_their_ends(steps):
    values = np.sin(np.arange(steps) / 50)
    values[steps // 3], values[steps // 2] = 7.0, -5.0
    svg = line_chart([Line("r", np.arange(steps), values, values - 1, values + 2)])
    (line,) = elements(svg, "path", "s0")
    x_of, y_of = scale(svg)
    drawn = points(line.get("d"))
    assert len(drawn) <= MAX_POINTS
    ys = [y_of(y) for _, y in drawn]
    assert (max(ys), min(ys)) == (pytest.approx(7, abs=0.1), pytest.approx(-5, abs=0.1))
    assert x_of(drawn[int(np.argmax(ys))][0]) == pytest.approx(steps // 3, abs=steps / 300)
    assert [x_of(drawn[0][0]), x_of(drawn[-1][0])] == pytest.approx([0, steps - 1], abs=steps / 300)
    (band,) = elements(svg, "path", "band")
    around = [y_of(y) for _, y in points(band.get("d"))]
    assert (max(around), min(around)) == (pytest.approx(9, abs=0.1), pytest.approx(-6, abs=0.1))
    assert len(svg) < 60_000


@pytest.mark.parametrize(
    "values",
    [
        *([], [3.0], [0.0, 0.0], [math.nan] * 4, [-2.0, -2.0], [1e-12, 2e-12], [1e18, -1e18]),
        *([1e6, 1e6 + 1], [1e300, -1e300, math.inf], [5e-324, 0.0]),
    ],
)
def test_any_values_make_a_valid_chart(values):
    svg = line_chart([Line("r", range(len(values)), values)], title="x", y_label="y", heading=True, background="white")
    assert "nan" not in svg.replace("nan:", "").lower().split("aria-label")[0]
    for path in elements(svg, "path"):
        assert re.fullmatch(r"[MLHVZhvlm\d .-]+", path.get("d")), path.get("d")


def test_names_are_escaped_and_control_characters_visible():
    evil = '<script>"&\x00\x1b\u202e'
    for svg in (line_chart([Line(evil, [0, 1], [0, 1])] * 2, title=evil), stacked_bar([(evil, 1.0)], title=evil)):
        assert "<script" not in svg
        assert "\\x1b\\u202e" in svg
        assert '<script>"&\\x00\\x1b\\u202e' in parsed(svg).get("aria-label")


def test_lines_differ_in_more_than_color():
    lines = [Line(f"line {index}", range(3), [index, index + 1, index]) for index in range(12)]
    svg = line_chart(lines, width=640)
    drawn = [
        path for path in elements(svg, "path") if path.get("class", "").startswith("s") and "h22" not in path.get("d")
    ]
    assert len({(path.get("stroke"), path.get("stroke-dasharray")) for path in drawn}) == 12
    assert len({path.get("stroke-dasharray") for path in drawn[:4]}) == 4
    assert [text.text for text in elements(svg, "text") if text.text.startswith("line")] == [
        line.name for line in lines
    ]
    assert all(float(text.get("x")) + 6 * len(text.text) < 640 for text in elements(svg, "text"))


def test_a_stacked_bar_divides_its_width():
    svg = stacked_bar([("rollout", 3.0), ("train", 1.0), ("none", 0.0), ("bad", math.nan)], width=400)
    bars = [bar for bar in elements(svg, "rect") if bar.get("height") == "28"]
    assert [float(bar.get("width")) for bar in bars] == pytest.approx([299, 99])
    assert [text.text for text in elements(svg, "text")] == ["rollout 3 s (75%)", "train 1 s (25%)"]
