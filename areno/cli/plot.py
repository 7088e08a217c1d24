"""``areno plot``: draws curves of several runs as SVG, or writes their metrics or samples as CSV or Parquet."""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.reports.export import write_metrics, write_samples
from areno.reports.plot import X_AXES, PlotLayout, metric_names, plot, recorded
from areno.reports.run_data import RunData

_PIXELS = {"px": 1.0, "in": 96.0, "": 1.0}
_SUFFIXES = (".svg", ".csv", ".parquet")
_SVG_ONLY = ("x", "smooth", "mean_over", "title", "width", "height")


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno plot",
        description="Draw the curves of several runs in one chart per metric (.svg), or write the values to a .csv or "
        ".parquet file (columns run, step, metric, value, time). The runs may come from `areno train` or `areno run`.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="Run directories; NAME=RUN sets the name in the legend.")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="What to draw, such as reward, loss, grad_norm or any name in metrics.jsonl; * stands for any text. "
        "Repeatable: the charts are drawn one below the other. Default: reward.",
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="File to write: .svg, .csv or .parquet.")
    parser.add_argument("--x", choices=X_AXES, default="step", help="Horizontal axis (default: %(default)s).")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="STEPS",
        default=1,
        help="Draw the moving mean over this many values; for a single run, with a band from the minimum to the "
        "maximum of these values.",
    )
    parser.add_argument(
        "--mean-over",
        action="append",
        default=[],
        metavar="NAME=RUN,RUN,...",
        help="Draw the mean of these runs, with a band from the lowest to the highest value. Repeatable.",
    )
    parser.add_argument("--title", default="", help="Title above the first chart.")
    parser.add_argument(
        "--width",
        metavar="SIZE",
        default="640px",
        help="Width of a chart, such as 640, 640px or 6in (default: %(default)s).",
    )
    parser.add_argument("--height", metavar="SIZE", default="360px", help="Height of a chart (default: %(default)s).")
    parser.add_argument(
        "--samples",
        action="store_true",
        help="Write the recorded samples instead of metrics, to a .csv or .parquet file.",
    )
    arguments = parser.parse_args(argv)
    out = Path(arguments.out)
    _check(arguments, out.suffix, parser)
    groups = _groups(arguments)
    single = {name: group[0] for name, group in groups.items()}
    if arguments.samples:
        print(f"{write_samples(single, out)} samples: {out}")
        return 0
    everything = [each for group in groups.values() for each in group]
    names = [metric_names(everything, pattern) for pattern in arguments.metric or ["reward"]]
    metrics = list(dict.fromkeys(name for each in names for name in each))
    if out.suffix == ".svg":
        for name, group in groups.items():
            if missing := [metric for metric in metrics if not recorded(group, metric)]:
                of_all = (
                    f", because there is no step for which all runs of {name} have a value" if len(group) > 1 else ""
                )
                print(f"note: {name} has no {', '.join(missing)}{of_all}", file=sys.stderr)
        _write_svg(plot(groups, metrics, *_layout(arguments, len(metrics))), out)
        print(f"curves={len(groups)} metrics={','.join(metrics)}: {out}")
    else:
        print(f"{write_metrics(single, metrics, out)} values: {out}")
    return 0


def _check(arguments: Namespace, suffix: str, parser: TypedParser) -> None:
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"--out {arguments.out} has an unsupported format; use a name that ends in {', '.join(_SUFFIXES[:-1])} "
            f"or {_SUFFIXES[-1]}"
        )
    if arguments.smooth < 1:
        raise UsageError(f"--smooth must be at least 1, got {arguments.smooth}")
    if arguments.samples and (suffix == ".svg" or arguments.metric):
        raise UsageError(
            "--samples writes a .csv or .parquet file; end the --out name with one of these suffixes, and omit --metric"
        )
    drawn = [
        f"--{name.replace('_', '-')}" for name in _SVG_ONLY if getattr(arguments, name) != parser.get_default(name)
    ]
    if suffix != ".svg" and drawn:
        raise UsageError(
            f"--out {arguments.out}: a {suffix} file contains recorded values and no chart; use {', '.join(drawn)} only with "
            "an .svg file"
        )


def _groups(arguments: Namespace) -> dict[str, list[RunData]]:
    """Return the runs of each curve, by the name of the curve. Only curves of ``--mean-over`` have several runs."""
    groups: dict[str, list[RunData]] = {}
    for word in arguments.runs:
        name, path = _named(word)
        data = RunData(path)
        label = name or data.name
        while label in groups:  # runs of the same name in several folders
            label = str(data.path) if label == data.name else f"{label}'"
        groups[label] = [data]
    for word in arguments.mean_over:
        name, equals, paths = word.partition("=")
        runs = [RunData(path) for path in paths.split(",") if path]
        if not (name and equals and runs):
            raise UsageError(f"--mean-over {word} is malformed; write NAME=RUN,RUN,...")
        if name in groups:
            raise UsageError(f"--mean-over {word}: another curve also has the name {name}; use a different name")
        groups[name] = runs
    if not groups:
        raise UsageError("areno plot needs at least one run; give its directory, or --mean-over NAME=RUN,RUN,...")
    return groups


def _named(word: str) -> tuple[str, str]:
    name, equals, path = word.partition("=")
    return (name, path) if equals and not Path(word).exists() else ("", word)


def _layout(arguments: Namespace, charts: int) -> tuple[PlotLayout, tuple[str, str]]:
    sizes = []
    for option in ("width", "height"):
        text = getattr(arguments, option)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(px|in|)", text)
        pixels = round(float(match[1]) * _PIXELS[match[2]]) if match else 0
        if not match or not 100 <= pixels <= 10_000:
            raise UsageError(
                f"--{option} {text} is not a size of 100 to 10000 pixels; use a size such as 640, 640px or 6in"
            )
        sizes.append((pixels, float(match[1]), match[2]))
    (width, shown_width, unit), (height, shown_height, height_unit) = sizes
    layout = PlotLayout(arguments.x, arguments.smooth, arguments.title, width, height)
    return layout, (f"{shown_width:g}{unit}", f"{shown_height * charts:g}{height_unit}")


def _write_svg(text: str, out: Path) -> None:
    try:
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror or error}; choose another file") from error
