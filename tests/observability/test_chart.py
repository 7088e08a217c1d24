"""Text charts, sparklines and safe one-line previews."""

import io
import math

import pytest

from areno.observability.chart import one_line, sparkline, supports_unicode, text_chart


def ascii_stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def test_a_rising_curve_rises():
    lines = text_chart([0.0, 0.0, 0.5, 1.0], width=4, height=3, title="reward", stream=io.StringIO()).split("\n")
    assert lines == [
        "reward",
        "  1 ┤   ╭",
        "0.5 ┤  ╭╯",
        "  0 ┤──╯",
        "    └────",
        "     1  4",
    ]


def test_a_steep_fall_is_connected_and_drawn_in_ascii_if_the_stream_needs_it():
    chart = text_chart([2.0, 2.0, 0.0, 0.0], width=4, height=3, stream=ascii_stream())
    assert chart.split("\n") == [
        "2 |--.",
        "1 |  |",
        "0 |  '-",
        "  +----",
        "   1  4",
    ]
    assert chart.isascii()


def test_a_long_series_fits_the_width_and_keeps_its_ends():
    chart = text_chart([i / 999 for i in range(1000)], width=40, height=8, stream=io.StringIO())
    body = chart.split("\n")
    assert max(map(len, body)) <= 40 + len("0.999 ┤")
    assert body[-1].rstrip().endswith("1000")
    assert len(body) == 8 + 2


def test_a_constant_series_is_a_flat_line_with_its_value():
    lines = text_chart([0.25] * 5, width=5, height=3, stream=io.StringIO()).split("\n")
    assert lines[1] == "0.25 ┤─────"
    assert lines[0].strip() == lines[2].strip() == "┤"


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_a_chart_without_values_says_so(values):
    assert text_chart(values, title="reward") == "reward\n(no values)"


def test_missing_values_leave_a_gap():
    lines = text_chart([1.0, math.nan, 2.0], width=3, height=2, stream=io.StringIO()).split("\n")
    assert lines[:2] == ["2 ┤  ─", "1 ┤─"]


def test_a_chart_too_small_to_draw_is_refused():
    with pytest.raises(ValueError, match="width=1"):
        text_chart([1.0], width=1, height=5)


def test_sparkline_spans_minimum_to_maximum():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 7], unicode=False) == "_#"
    assert len(sparkline(list(range(1000)), width=20)) == 20
    assert sparkline([]) == ""
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"


def test_a_preview_neutralizes_escape_codes_and_stays_on_one_line():
    assert one_line("a\nb\x1b[2Jc\rd", 100) == "a↵b�[2Jc�d"
    assert one_line("é\n", 100, unicode=False) == "?\\n"
    assert one_line("x" * 100, 10) == "x" * 9 + "…"
    assert one_line("x" * 10, 10) == "x" * 10
    assert len(one_line("\n" * 100, 10, unicode=False)) == 10


def test_only_utf_streams_support_unicode():
    assert supports_unicode(io.StringIO())
    assert not supports_unicode(ascii_stream())
