"""Formats a comparison of two runs for the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from areno.reports.compare import CurveDifference, RunComparison, SettingDifference
from areno.reports.divergence import StepDifference

_WIDTH = 48  # characters of a value
_METRICS = 6  # metrics of a step that are listed
_ROUNDING = "a rounding difference, for example due to another processor, has grown from step to step"
_NO_CAUSE = {
    "prompts": "the data may have changed, or the batches of an asynchronous rollout depended on timing",
    "sampled tokens": "the number of threads, the rounding of operations, or the timing of an asynchronous rollout may differ",
    "log-probs": "the model's files may have changed, or an earlier difference was too small to be reported",
    "rewards": "the reward function may have changed, or may be random",
    "advantages": "samples that were not recorded may have different rewards",
    "update": "samples that were not recorded may differ, or the computation is not deterministic",
    "evaluation": "the evaluation may sample at random, or its data or reward function may have changed",
}


def comparison_text(comparison: RunComparison) -> Iterator[str]:
    """Yield the lines of a comparison: runs, first step that differs, settings, environment, curves."""
    for letter, run in zip("AB", comparison.runs, strict=True):
        steps = f"{run['last_step'] + 1} steps"
        yield "  ".join(filter(None, [letter, run["path"], run["command"], run["algorithm"], steps, run["state"]]))
    yield ""
    yield from _first_difference(comparison)
    decisive = [setting for setting in comparison.settings if setting.changes_results]
    others = [setting for setting in comparison.settings if not setting.changes_results]
    for title, differences in (
        ("Settings that may change results", decisive),
        ("Other settings", others),
        ("Environment", comparison.environment),
    ):
        yield ""
        yield f"{title}: {'' if differences else 'no differences'}".rstrip()
        yield from _table([["", "A", "B"], *map(_row, differences)] if differences else [])
    yield ""
    yield from _curves(comparison.curves)


def _first_difference(comparison: RunComparison) -> Iterator[str]:
    result = comparison.divergence
    lengths = [run["last_step"] + 1 for run in comparison.runs]
    shared = (
        f"the {result.steps} steps that both runs recorded" if lengths[0] != lengths[1] else f"all {result.steps} steps"
    )
    if not result.steps:
        yield "The runs have no metrics in common."
    elif result.different is None and result.unequal is None:
        yield f"No difference: {shared} are bit-equal."
    elif result.different is None:
        assert result.unequal is not None
        yield (
            f"No difference: {shared} agree to within 1e-6, but are not bit-equal from step {result.unequal.step} on: "
            f"{result.unequal.text}."
        )
    else:
        yield from _step(comparison, result.different)


def _step(comparison: RunComparison, different: StepDifference) -> Iterator[str]:
    yield f"First difference: step {different.step}, {different.phase}"
    if different.text:
        yield f"  {different.text}"
    unequal = comparison.divergence.unequal
    rounding = unequal is not None and unequal.step < different.step
    if unequal is not None and rounding:
        yield f"  The runs are not bit-equal from step {unequal.step} on: {unequal.text}"
    if comparison.causes:
        causes = "; ".join(
            f"{cause.name}: {_value(first)} in the first run, {_value(second)} in the second"
            for cause in comparison.causes
            for first, second in [cause.values]
        )
        yield f"  Differences that affect this phase: {causes}"
    elif different.phase in _NO_CAUSE:
        reason = _ROUNDING if rounding else _NO_CAUSE[different.phase]
        yield f"  All settings that affect this phase are the same in both runs. Possible cause: {reason}"
    if different.metrics:
        yield f"  Metrics of this step ({len(different.metrics)} differ):"
        rows = [
            [f"  {metric.name}", f"{metric.values[0]:.9g}", f"{metric.values[1]:.9g}", f"{metric.relative:.1e}"]
            for metric in different.metrics[:_METRICS]
        ]
        yield from _table([["", "A", "B", "relative"], *rows])


def _row(setting: SettingDifference) -> list[str]:
    more = f"  (and {setting.same} more)" if setting.same else ""
    return [f"  {setting.name}{more}", *map(_value, setting.values)]


def _value(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2]}…{text[-_WIDTH // 2 :]}"


def _curves(curves: Sequence[CurveDifference]) -> Iterator[str]:
    if not curves:
        return
    yield f"Curves over the steps that both runs recorded (number of steps: {max(curve.steps for curve in curves)}):"
    rows = [
        [
            f"  {curve.key}",
            *(f"{value:.5g}" for value in (*curve.first, *curve.last, *curve.mean)),
            f"{curve.difference:+.3g}",
        ]
        for curve in curves
    ]
    yield from _table([["", "first A", "B", "last A", "B", "mean A", "B", "B - A"], *rows])


def _table(rows: Iterable[list[str]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
