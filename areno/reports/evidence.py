"""Defines the input (:class:`Evidence`) and the results (:class:`RunProblem`) of the checks of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from areno.reports.advice import OptionAdvice
from areno.reports.learning import Progress
from areno.reports.run_data import RunData
from areno.reports.run_samples import Indices, RunSamples
from areno.reports.trends import SeriesTrend, finite, trend_of, window
from areno.storage.metric_columns import Series

TIED = 0.8
"""Minimum fraction of prompts, steps or answers that means "nearly all" in the checks of a run.

For example, the run has little left to learn if, for at least this fraction of the prompts, all answers have the same reward.
"""
SHOWN = 3
"""Maximum number of samples listed for a problem."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """A problem of a run.

    Attributes:
        key: short name of the kind of problem.
        text: description of the problem, with numbers.
        remedy: what to change.
        samples: IDs ``STEP/PROMPT/SAMPLE`` of samples that show the problem.
    """

    key: str
    text: str
    remedy: str
    samples: tuple[str, ...] = ()


class Evidence:
    """The data that the checks of a run use."""

    def __init__(self, run: RunData) -> None:
        self.run, self.advice, self.samples, self.progress = run, OptionAdvice(run), RunSamples(run), Progress(run)
        self._trends: dict[str, SeriesTrend | None] = {}

    def trend(self, key: str) -> SeriesTrend | None:
        """Return the trend of ``key``, a quantity in ``run_data.KEYS``; None if fewer than two values are finite."""
        if key not in self._trends:
            self._trends[key] = trend_of(self.run.series(key))
        return self._trends[key]

    def late(self, key: str) -> float:
        """Return the mean of ``key``, a quantity in ``run_data.KEYS``, over the last steps; NaN if it was not recorded."""
        return late_mean(self.run.series(key))

    @cached_property
    def reward_rises(self) -> bool:
        """Whether the training reward (the loss, if there are no rewards) clearly improved and did not get worse again."""
        return self.progress.up(self.progress.train) and not self.progress.lost(self.progress.train)

    @cached_property
    def at_highest(self) -> bool:
        """Whether the last rewards are close to the highest reward of the run.

        False if all rewards of the run are equal.
        """
        highs, lows = finite(self.run.series("reward_max"))[1], finite(self.run.series("reward_min"))[1]
        if not len(highs) or not len(lows):
            return False
        high, low = float(highs.max()), float(lows.min())
        return high > low and self.late("reward") >= high - 0.1 * (high - low)

    @cached_property
    def neglected(self) -> str:
        """Name of the reward part whose mean over the last steps has the lowest relative position in the part's range.

        The range of a part extends from its minimum to its maximum over recorded samples. The name is ``""`` if the means of
        all parts are in the upper half of their ranges. Parts that are never above 0 (penalties) are ignored.
        """
        parts_of_run, samples, lowest = self.run.reward_parts(), self.samples, 0.5
        chosen = [*samples.spread(samples.early), *samples.spread(samples.late)] if parts_of_run else []
        recorded = [samples.texts(index).get("reward_parts") or {} for index in chosen]
        name_of_lowest = ""
        for name, series in parts_of_run.items():
            values = [number(parts[name]) for parts in recorded if name in parts]
            low, high = min(values, default=0.0), max(values, default=0.0)
            position = (late_mean(series) - low) / (high - low) if high > max(low, 0.0) else 1.0
            if position < lowest:
                name_of_lowest, lowest = name, position
        return name_of_lowest

    @property
    def solved(self) -> bool:
        """Whether the last rewards are close to the highest reward of the run, and no reward part is low.

        A reward part is low if its mean over the last steps is in the lower half of its range; see ``neglected``.
        """
        return self.at_highest and not self.neglected

    @cached_property
    def broke(self) -> int | None:
        """The step at which the reward of a run collapsed; None if the reward did not collapse.

        From this step to the end of the run, no reward exceeds the midpoint between two values: the highest reward of the run,
        and the mean reward over the last steps (see :func:`late_mean`).
        """
        steps, values = finite(self.run.series("reward"))
        if not len(values):
            return None
        above = np.flatnonzero(values > (values.max() + self.late("reward")) / 2)
        return int(steps[above[-1] + 1]) if len(above) and above[-1] + 1 < len(steps) else None

    def rate_at(self, step: int | None) -> float | None:
        """Return the learning rate in a step; None if the step is None, or if no learning rates were recorded."""
        steps, rates = finite(self.run.series("learning_rate"))
        return None if step is None or not len(steps) else float(np.interp(step, steps, rates))

    def lower_rate(self, step: int | None, factor: float) -> str:
        """Return the option ``--lr`` with a lower value.

        The value is ``factor`` times the lower of two learning rates: the rate in ``step`` and the run's ``--lr``. If neither
        rate is known, return ``--lr`` without a value.
        """
        lowest = min(self.rate_at(step) or math.inf, self.advice.number("--lr") or math.inf)
        return self.advice.changed("--lr", factor * lowest) if lowest < math.inf else "--lr"

    @cached_property
    def tied(self) -> tuple[float, Indices]:
        """The fraction of tied prompts in the last steps, and one sample of each recorded tied prompt.

        A prompt is tied if all its answers have the same reward. If each prompt has only one answer, the fraction
        is 0, and no samples are returned.
        """
        if not (self.advice.number("--n-samples") or 1) > 1:
            return 0.0, np.zeros(0, np.int64)
        share, indices = self.samples.tied(self.samples.late)
        recorded = self.late("zero_std_groups")
        return share if math.isnan(recorded) else recorded, indices

    def spread(self) -> tuple[str, ...]:
        """Return the IDs of at most ``SHOWN`` samples, evenly distributed over the samples of the last steps."""
        return self.ids(self.samples.spread(self.samples.late, SHOWN))

    def ids(self, indices: Sequence[int] | Indices) -> tuple[str, ...]:
        """Return the IDs of the first samples in ``indices``, at most ``SHOWN``."""
        return self.samples.ids(indices[:SHOWN])


def late_mean(series: Series) -> float:
    """Return the mean of a series over the last steps; NaN if no value is finite."""
    values = finite(series)[1]
    return float(values[-max(window(len(values)), 1) :].mean()) if len(values) else math.nan


def number(value: object) -> float:
    """Convert an int or a float to a float. For a value of another type, return 0.0."""
    return float(value) if isinstance(value, int | float) else 0.0
