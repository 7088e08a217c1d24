"""Collects the contents of the sections of a report, as plain data and charts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from areno.observability.samples import bounded
from areno.observability.step_memory import AVAILABLE, GIB, PEAK, PEAK_GPU
from areno.reports.evidence import RunProblem
from areno.reports.run_data import RunData
from areno.reports.run_samples import RunSamples
from areno.reports.sample_views import SampleView, SampleViews, data_text, is_truncated, number
from areno.reports.settings import settings_of_run
from areno.reports.svg import Line, line_chart, short, stacked_bar
from areno.reports.trends import finite
from areno.storage.json_lines import as_float
from areno.storage.metric_columns import Series

EXTREMES = 4
"""Number of best samples, and number of worst samples, that a report shows."""
CHANGES = 2
"""Maximum number of prompts whose first and last answers in the run are shown token by token."""
COMPARED = 8
"""Maximum number of prompts for which the report compares the first and the last answer in the run."""
ANSWER_CHARS = 800
"""Maximum number of characters of each prompt and each answer in the comparison of first and last answers."""
MAX_PARTS = 8
"""Maximum number of curves in a chart, for example in the chart of the reward parts."""
MAX_LINES = 500
"""Maximum number of listed warnings, and of listed settings."""
VALUE_CHARS = 300
"""Maximum number of characters that the report shows of a setting's name or value."""
WARNING_CHARS = 1000
"""Maximum number of characters of a warning."""
MAX_FILES = 200
"""Maximum number of listed files."""
_WIDTH, _HEIGHT = 460, 240  # chart size in px: labels stay readable at 360 px
_TYPICAL = 1000  # number of last steps whose median is the typical step
_BESIDE_STEPS = ("save", "eval", "checkpoint_for_recover")  # phases that are not part of a step
_OVERLAPPING = ("step", "rollout_pause")  # the whole step, and what happens during another phase
_SINGLE = (
    ("Loss", "loss"),
    ("Entropy, in nats", "entropy"),
    ("Gradient norm", "grad_norm"),
    ("Clipped fraction", "clip_fraction"),
    ("Log-prob gap between sampling and training", "logprob_gap"),
    ("Tokens per answer", "response_length"),
    ("Truncated answers, as a fraction", "truncated"),
    ("Prompts whose answers have equal rewards, as a fraction", "zero_std_groups"),
    ("Staleness, in updates", "staleness"),
    ("Learning rate", "learning_rate"),
)
_FILES = {
    "config.yaml": "the configuration",
    "metrics.jsonl": "the metrics of each step",
    "samples.jsonl": "samples, token by token",
    "samples.index": "the position of each sample in samples.jsonl",
    "eval_samples.jsonl": "answers in evaluations",
    "warnings.jsonl": "health warnings",
    "environment.json": "the machine, the software versions, and the size of the data",
    "status.json": "how the run ended",
    "summary.json": "the summary of a finished run",
    "log.txt": "the log",
    "main.log": "the log",
    "events": "scalars for TensorBoard",
    "checkpoints": "models and training states to resume from",
    "report.html": "this report",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its title and the names of its metrics."""

    title: str
    names: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class ShownSamples:
    """Samples shown under one heading.

    Samples that are already shown under an earlier heading are in ``links``, because they are only linked. The others are in
    ``samples``.
    """

    title: str
    note: str
    samples: list[SampleView]
    links: list[SampleView]


def curves(run: RunData) -> Iterator[Chart]:
    """Yield charts of the metrics that a run recorded."""
    if name := run.metric_of("reward"):
        yield _chart(
            "Reward"
            + (" (band: one standard deviation)" if run.metric_of("reward_std") else " (band: lowest to highest)"),
            name,
            [_reward(run)],
        )
    if parts := _lines(run.reward_parts()):
        yield _chart("Parts of the reward", "", parts)
    share = "share of rewards above 0" if run.metric_of("eval_reward") else "share of pairs ranked correctly"
    for title, key in (
        ("Evaluation: reward", "eval_reward"),
        (f"Evaluation: {share}", "eval_accuracy"),
        ("Evaluation: loss", "eval_loss"),
        *_SINGLE,
    ):
        if name := run.metric_of(key):
            yield _chart(title, name, [_line(name, run.series(key))])


def _reward(run: RunData) -> Line:
    series, bounds = run.series("reward"), [run.series(key) for key in ("reward_std", "reward_min", "reward_max")]
    steps, mean = series.arrays()
    deviation, low, high = (bound.arrays()[1] if len(bound.steps) == len(steps) else None for bound in bounds)
    if deviation is not None:
        low, high = mean - deviation, mean + deviation
    return Line("reward", steps, mean, low, high)


def _line(name: str, series: Series) -> Line:
    return Line(name, *series.arrays())


def _lines(series: Mapping[str, Series]) -> list[Line]:
    return [_line(name, values) for name, values in list(series.items())[:MAX_PARTS]]


def _chart(title: str, names: str, lines: Sequence[Line]) -> Chart:
    return Chart(title, names, Markup(line_chart(lines, title=title, width=_WIDTH, height=_HEIGHT)))


@dataclass(frozen=True, slots=True)
class Times:
    """The time that each phase of a run took.

    Attributes:
        bar: the phases of a typical step.
        phases: for each phase, the name, seconds in a typical step, seconds in total, and the fraction of the run's time.
        charts: time, throughput and memory over the run.
        since: the first step after the run was last resumed, or 0. Totals and fractions include no steps before this step.
    """

    bar: Markup | None
    phases: list[tuple[str, str, str, str]]
    charts: list[Chart]
    since: int


def times(run: RunData) -> Times:
    """Return a table and charts of the time that each phase of a run took.

    If memory use was recorded, there is also a chart of the memory use.
    """
    phases = {name: series for name, series in run.phases().items() if name not in _OVERLAPPING}
    typical = {
        name: float(np.median(values[-_TYPICAL:]))
        for name, series in phases.items()
        if len(values := finite(series)[1])
    }
    whole = finite(run.series("step_seconds"))[1]
    in_step = [(name, seconds) for name, seconds in typical.items() if name not in _BESIDE_STEPS]
    if len(whole) and (rest := float(np.median(whole[-_TYPICAL:])) - sum(seconds for _, seconds in in_step)) > 0:
        in_step.append(("other", rest))
    since, total = span(run)
    table = []
    for name, series in phases.items():
        spent = _sum_from(since, series)
        share = f"{spent / total:.0%}" if total > spent else ""
        table.append((name, "" if name in _BESIDE_STEPS else short(typical.get(name, 0.0)), short(spent), share))
    if total > (steps := _sum_from(since, run.series("step_seconds"))):
        table.append(("outside of steps", "", short(total - steps), f"{1 - steps / total:.0%}"))
    charts = [_chart("Seconds per phase", "", _lines(phases))] if phases else []
    memory = {name: run.metrics[name] for name in (PEAK, AVAILABLE, PEAK_GPU) if name in run.metrics}
    charts += [_chart("Memory, in GiB", "", _lines(memory))] if memory else []
    if rate := run.metric_of("tokens_per_second"):
        charts.append(_chart("Tokens per second", rate, [_line(rate, run.series("tokens_per_second"))]))
    bar = Markup(stacked_bar(in_step, title="Phases of a typical step", width=_WIDTH)) if in_step else None
    return Times(bar, table, charts, since)


def span(run: RunData) -> tuple[int, float]:
    """Return the first step after a run was last resumed, and the run time of the resumed process in seconds.

    If the run was never resumed, the step is 0, and the run time is that of its only process. The run time is measured
    until the end of the process or, if this end is unknown, until the last record of the metrics. If the start of the process
    is unknown, the step and the run time are 0.
    """
    status, (steps, recorded) = run.status, run.metrics.times.arrays()
    started, ended = (as_float(status.get(name, math.nan)) for name in ("started", "ended"))
    steps_since, recorded_since = steps[recorded >= started], recorded[recorded >= started]
    if not len(steps_since):
        return 0, 0.0
    since = int(steps_since[0]) if len(steps_since) < len(steps) else 0
    return since, (ended if math.isfinite(ended) else float(recorded_since[-1])) - started


def _sum_from(step: int, series: Series) -> float:
    steps, values = finite(series)
    return float(values[steps >= step].sum())


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers to one prompt in two steps of a run."""

    prompt: str
    data: str
    steps: tuple[int, int]
    rewards: tuple[str, str]
    truncated: tuple[bool, bool]
    answers: tuple[str, str]
    change: float


def comparisons(run: RunData, samples: RunSamples) -> tuple[str, list[Comparison]]:
    """Compare the first and the last recorded answer to each of several prompts.

    The prompts are held-out prompts if the run has answers from several evaluations. Otherwise, they are training prompts that
    were sampled in several steps. Return a sentence that describes the prompts, and one comparison per prompt.
    """
    answers: dict[int, dict[int, dict[str, Any]]] = {}
    for record in run.eval_samples:
        answers.setdefault(record["step"], {})[record.get("prompt_index", 0)] = record
    if len(answers) > 1:
        first, last = answers[min(answers)], answers[max(answers)]
        pairs = [(first[index], last[index]) for index in first if index in last]
        note = f"Answers to held-out prompts, from the evaluations at steps {min(answers)} and {max(answers)}."
    else:
        pairs = [(samples.texts(early), samples.texts(late)) for early, late in samples.recurring[:COMPARED]]
        note = "Training prompts that were sampled in several steps, each with its first and its last recorded answer."
    return note, [_comparison(*pair) for pair in pairs[:COMPARED]]


def _comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    return Comparison(
        bounded(after.get("prompt"), ANSWER_CHARS),
        data_text(after),
        (before["step"], after["step"]),
        (number(before.get("reward")), number(after.get("reward"))),
        (is_truncated(before), is_truncated(after)),
        (bounded(before.get("completion"), ANSWER_CHARS), bounded(after.get("completion"), ANSWER_CHARS)),
        as_float(after.get("reward")) - as_float(before.get("reward")),
    )


def sample_groups(samples: RunSamples, problems: Sequence[RunProblem]) -> list[ShownSamples]:
    """Return the samples that a report shows, in groups.

    The groups are the samples listed in problems, the best samples, the worst samples, and, for the prompts with the largest
    changes in reward, the first and the last answer. If all rewards are equal, the latest samples replace the best and
    the worst samples.
    """
    names = dict.fromkeys(name for problem in problems for name in problem.samples)
    named = [index for name in names if (index := samples.position(name)) is not None]
    changed = [index for pair in samples.changes(CHANGES) for index in pair]
    chosen = (
        ("Listed in the verdict", "", named),
        *_extremes(samples),
        ("Most changed", "The first and last answers to the prompts whose reward changed most.", changed),
    )
    views, shown, groups = SampleViews(), dict[int, SampleView](), []
    for title, note, indices in chosen:
        indices = list(dict.fromkeys(indices))
        links = [shown[index] for index in indices if index in shown]
        new = {index: views.view(samples.record(index)) for index in indices if index not in shown}
        shown |= new
        if indices:
            groups.append(ShownSamples(title, note, list(new.values()), links))
    return groups


def _extremes(samples: RunSamples) -> Iterator[tuple[str, str, list[int]]]:
    best, worst = (samples.extremes(EXTREMES, highest=highest) for highest in (True, False))
    if best and samples.rewards[best[0]] == samples.rewards[worst[0]]:
        yield "Latest", f"All recorded samples have the reward {short(samples.rewards[best[0]])}.", best
    else:
        yield (
            "Best",
            "The samples with the highest recorded rewards. If rewards are equal, samples with recorded tokens come before "
            "samples without recorded tokens, and newer samples before older samples.",
            best,
        )
        yield (
            "Worst",
            "The samples with the lowest recorded rewards. If rewards are equal, samples with recorded tokens come before "
            "samples without recorded tokens, and newer samples before older samples.",
            worst,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a report lists. Settings without a value are omitted.

    ``chosen`` are the settings that differ from their default. ``defaults`` are the other settings. A report lists at most
    ``MAX_LINES`` settings. ``left_out`` is the number of settings beyond this limit.
    """

    chosen: list[tuple[str, str]]
    defaults: list[tuple[str, str]]
    left_out: int


def settings(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a configuration. Long names and long values are shortened."""
    chosen, defaults = (
        [(bounded(name, VALUE_CHARS), bounded(value, VALUE_CHARS)) for name, value in part]
        for part in settings_of_run(config)
    )
    shown = chosen[:MAX_LINES], defaults[: max(MAX_LINES - len(chosen), 0)]
    return Settings(*shown, len(chosen) + len(defaults) - sum(map(len, shown)))


def warnings(run: RunData) -> list[tuple[str, str]]:
    """Return the step and the text of each of the last ``MAX_LINES`` health warnings."""
    return [
        (str(warning["step"]), bounded(warning.get("text"), WARNING_CHARS)) for warning in run.warnings[-MAX_LINES:]
    ]


def facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts in ``environment.json`` (versions, hardware, data sizes) as pairs of name and value."""
    for name, value in environment.items():
        if name == "packages" and isinstance(value, dict):
            yield from ((str(package), str(version)) for package, version in value.items())
        elif name.endswith("memory_bytes"):
            yield name.removesuffix("_bytes").replace("_", " "), f"{as_float(value) / GIB:.1f} GiB"
        elif name == "data" and isinstance(value, dict):
            yield from (
                (bounded(key, VALUE_CHARS).replace("_", " "), bounded(size, VALUE_CHARS)) for key, size in value.items()
            )
        elif name == "recorded":
            yield "recorded", date(as_float(value))
        else:
            text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            yield bounded(name, VALUE_CHARS), bounded(text, VALUE_CHARS)


def files(run: RunData) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the size and the content of each file in a run directory."""
    shown = (path for path in run.path.iterdir() if not path.name.startswith(".") and not path.name.endswith(".tmp"))
    for path in sorted(shown)[:MAX_FILES]:
        yield path.name, _size(path), _FILES.get(path.name, "")


def _size(path: Path) -> str:
    if path.is_dir():
        return "folder"
    if not path.exists():
        return "missing"  # a link to a folder that was not copied
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def date(seconds: float) -> str:
    """Format Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    for size, unit, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {small}"
    return f"{seconds:.3g} s"
