"""``areno explain``: explains a metric: its meaning, its normal values, and what to do if a value is not normal."""

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from areno.config.options import nearest
from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.observability.chart import one_line, printable, sparkline, supports_unicode
from areno.reports.explanation import Explanation, explain, explanations, known_names
from areno.reports.run_data import RunData
from areno.storage.metric_columns import Series

_LABEL_WIDTH = 11
_SPARKLINE_WIDTH = 40


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno explain",
        description="Explain a metric: its meaning and unit, its normal values, and what to do about other values.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "metric",
        metavar="METRIC",
        nargs="?",
        help="A metric by full name or short name, such as reward; without a name, all metrics are listed.",
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="Also show the metric's values in this run directory; without METRIC, list only this run's metrics.",
    )
    arguments = parser.parse_args(argv)
    width = shutil.get_terminal_size().columns
    data = RunData(arguments.run) if arguments.run else None
    for line in _list(width, data) if arguments.metric is None else _explain(arguments.metric, width, data):
        print(printable(line))  # names of metrics may come from the user's code
    return 0


def _list(width: int, data: RunData | None) -> Iterator[str]:
    listed = explanations() if data is None else _recorded(data)
    for (front_end, section), members in groupby(listed, lambda one: (one.front_end, one.section)):
        rows = list(members)
        column = max(len(one.name) for one in rows)
        yield f"{section} ({front_end})"
        for one in rows:
            yield one_line(f"  {one.name:<{column}}  {one.meaning}", width, unicode=supports_unicode(sys.stdout))
        yield ""


def _recorded(data: RunData) -> list[Explanation]:
    explained = {one.name: one for name in data.metrics.names for one in explain(name)}
    order = {one.section: position for position, one in enumerate(explanations())}
    return sorted(explained.values(), key=lambda one: order[one.section])


def _explain(query: str, width: int, data: RunData | None) -> Iterator[str]:
    candidates = explain(query)
    names = {} if data is None else {one: name for one in candidates if (name := _name_in(data, one, query))}
    if data is not None and not candidates and query in data.metrics:
        yield from (query, "  areno does not document this metric, which your own code reports", "")
        yield from _course(data, query, None)
        return
    if not candidates:
        raise UsageError(
            f"{query!r} is not a metric{nearest(query, known_names())}; run `areno explain` to list all metrics"
        )
    shown = next(iter(names), candidates[0])
    yield from _describe(shown, width)
    others = [f"{one.name} ({one.front_end})" for one in candidates if one is not shown]
    if others and not names:
        yield from _field("also", ", ".join(others), width)
    if data is not None:
        yield ""
        if not names:
            yield f"{data.path} has not recorded this metric"
        else:
            yield from _course(data, names[shown], shown)


def _describe(one: Explanation, width: int) -> Iterator[str]:
    yield f"{one.name} ({one.front_end})"
    yield from _field("meaning", one.meaning, width)
    yield from _field("unit", one.unit, width)
    if one.advice is not None:
        yield from _field("normal", one.advice.text, width)
        yield from _field("if not", one.advice.remedy, width)


def _field(label: str, text: str, width: int) -> list[str]:
    body = textwrap.wrap(text, max(width - _LABEL_WIDTH, 20), break_long_words=False, break_on_hyphens=False)
    return [f"  {label if i == 0 else '':<{_LABEL_WIDTH - 2}}{line}" for i, line in enumerate(body)]


def _name_in(data: RunData, one: Explanation, query: str) -> str | None:
    candidates = (query if query.startswith(one.name) else one.name, one.name, f"{one.name}/avg")
    return next((name for name in candidates if name in data.metrics), None)


def _course(data: RunData, name: str, one: Explanation | None) -> Iterator[str]:
    series: Series = data.metrics[name]
    finite = [value for value in series.values if math.isfinite(value)]
    yield f"{name} in {data.path}: {len(series.values)} values, steps {series.steps[0]} to {series.steps[-1]}"
    if not finite:
        yield "  none of the values is finite"
        return
    numbers = {"first": series.values[0], "last": series.last, "min": min(finite), "max": max(finite)}
    yield "  " + "   ".join(f"{label} {value:.4g}" for label, value in numbers.items())
    yield f"  {sparkline(series.values, width=_SPARKLINE_WIDTH, unicode=supports_unicode(sys.stdout))}"
    advice = None if one is None else one.advice
    if advice is None or advice.accepts(series.last) is None:
        return
    outside = sum(not advice.accepts(value) for value in series.values)
    state = "in" if advice.accepts(series.last) else "outside"
    yield f"  the last value is {state} the normal range ({advice.range}); {outside} of {len(series.values)} values are outside"
