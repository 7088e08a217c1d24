"""Draws text charts, and shortens texts to one line.

Line charts are printed at the end of a run, and sparklines are part of the live display. If the stream cannot encode Unicode,
the charts use ASCII. Control characters in texts are escaped or replaced.
"""

import math
import sys
from collections.abc import Sequence
from typing import IO, NamedTuple, TextIO


class _Glyphs(NamedTuple):
    """Characters of a line chart.

    In a column where the line falls, ``down[0]`` is drawn in the row of the previous value, and ``down[1]`` in the row of the
    new value. In a column where the line rises, ``up`` is used in the same way.
    """

    flat: str
    down: str
    up: str
    rise: str
    axis: str
    corner: str


_UNICODE = _Glyphs(flat="─", down="╮╰", up="╯╭", rise="│", axis="┤", corner="└")
_ASCII = _Glyphs(flat="-", down=".'", up="'.", rise="|", axis="|", corner="+")
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_ASCII = "_.-~=+*#"


def supports_unicode(stream: IO[str]) -> bool:
    """Return whether the encoding of a stream is a UTF encoding. A stream without an encoding counts as UTF-8."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def text_chart(
    values: Sequence[float], *, width: int = 60, height: int = 10, title: str = "", stream: TextIO | None = None
) -> str:
    """Draw a line chart of ``values`` over their index.

    If there are more than ``width`` values, each column shows the mean of several values. A column without finite values is a
    gap. The chart uses Unicode if ``stream`` (by default ``sys.stdout``) has a UTF encoding, and ASCII otherwise.

    Raises:
        ValueError: ``width`` or ``height`` is below 2.
    """
    if width < 2 or height < 2:
        raise ValueError(f"the width and the height of a chart must be at least 2, got width={width} height={height}")
    glyphs = _UNICODE if supports_unicode(stream or sys.stdout) else _ASCII
    head = [title] if title else []
    columns = _columns(values, width)
    finite = [value for value in columns if value is not None]
    if not finite:
        return "\n".join([*head, "(no values)"])
    low, high = min(finite), max(finite)
    rows = [None if value is None else _level(value, low, high, height) for value in columns]
    canvas = _draw(rows, height, glyphs)
    labels = [_label(low + (high - low) * (height - 1 - i) / (height - 1)) for i in range(height)]
    if low == high:
        middle = height - 1 - next(row for row in rows if row is not None)
        labels = [_label(low) if i == middle else "" for i in range(height)]
    margin = max(map(len, labels))
    body = [
        f"{label:>{margin}} {glyphs.axis}{''.join(line).rstrip()}" for label, line in zip(labels, canvas, strict=True)
    ]
    last = str(len(values))
    body.append(f"{'':>{margin}} {glyphs.corner}{glyphs.flat * width}")
    body.append(f"{'':>{margin}}  1{last:>{width - 1}}")
    return "\n".join([*head, *body])


def sparkline(values: Sequence[float], *, width: int = 20, unicode: bool = True) -> str:
    """Draw a series as at most ``width`` characters, whose heights range from the minimum to the maximum of the series.

    If the series is longer, each character shows the mean of several values. A character without finite values is blank. A
    series without finite values gives an empty string.
    """
    marks = _SPARKS if unicode else _SPARKS_ASCII
    columns = _columns(values, min(width, len(values)))
    finite = [value for value in columns if value is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    return "".join(" " if value is None else marks[_level(value, low, high, len(marks))] for value in columns)


def printable(text: str) -> str:
    """Escape unprintable characters as in Python literals. Line breaks and tabs stay unchanged."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def one_line(text: str, limit: int, *, unicode: bool = True) -> str:
    """Shorten ``text`` to one line of at most ``limit`` printable characters.

    Line breaks become a visible mark, and tabs become spaces. Other unprintable characters become a replacement character.
    Without ``unicode``, all non-ASCII characters also become a replacement character.
    """
    newline, unknown, more = ("↵", "�", "…") if unicode else ("\\n", "?", "...")
    # Truncate first: the text may be a megabyte.
    clean = text[: limit + 1].replace("\r\n", "\n").replace("\n", newline).replace("\t", " ")
    safe = "".join(c if c.isprintable() and (unicode or c.isascii()) else unknown for c in clean)
    return safe if len(safe) <= limit and len(text) <= limit else safe[: limit - len(more)] + more


def _columns(values: Sequence[float], width: int) -> list[float | None]:
    columns: list[float | None] = []
    for i in range(width if values else 0):
        start = i * len(values) // width
        stop = max(start + 1, (i + 1) * len(values) // width)
        finite = [float(value) for value in values[start:stop] if math.isfinite(value)]
        columns.append(sum(finite) / len(finite) if finite else None)
    return columns


def _level(value: float, low: float, high: float, levels: int) -> int:
    return round((value - low) / (high - low) * (levels - 1)) if high > low else levels // 2


def _draw(rows: Sequence[int | None], height: int, glyphs: _Glyphs) -> list[list[str]]:
    """Draw the curve as ``height`` lines of characters, from top to bottom."""
    canvas = [[" "] * len(rows) for _ in range(height)]
    previous: int | None = None
    for x, row in enumerate(rows):
        if row is not None:
            if previous is None or previous == row:
                canvas[height - 1 - row][x] = glyphs.flat
            else:
                corners = glyphs.down if row < previous else glyphs.up
                canvas[height - 1 - previous][x] = corners[0]
                canvas[height - 1 - row][x] = corners[1]
                for between in range(min(row, previous) + 1, max(row, previous)):
                    canvas[height - 1 - between][x] = glyphs.rise
        previous = row
    return canvas


def _label(value: float) -> str:
    return f"{value:.3g}"
