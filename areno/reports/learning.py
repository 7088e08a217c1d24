"""Determines whether a run learned, from its training metrics and, if there are any, its evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from areno.reports.run_data import RunData
from areno.reports.svg import short
from areno.reports.trends import CLEAR, SeriesTrend, finite, trend_of
from areno.storage.metric_columns import Series

MIN_STEPS = 8
"""Minimum number of steps for the verdict that the model did not learn. With fewer steps, the verdict is "unknown".

The verdict compares the mean training reward or loss at the start and at the end of the run. With fewer steps, each mean would
cover fewer than four steps.
"""
LOST = 0.5
"""A gain counts as lost if the run later loses more than this fraction of the gain."""
FOLLOWS = 0.5
"""Held-out data confirms a change of the training metric if (held-out change) / (training change) is at least this number.

For example, if the training reward rises by 0.4, a rise of the held-out reward by 0.2 is sufficient, even if this rise is
within the noise of the evaluations.
"""
LOSS_NOISE = 0.002
"""Noise of a held-out loss, as a fraction of the loss. The noise is small, because all evaluations use the same examples."""

State = Literal["yes", "exploited", "memorized", "partly", "no", "worse", "lost", "unknown"]
HEADLINES: dict[State, str] = {
    "yes": "Yes.",
    "exploited": "The reward rose, but the policy seems to exploit the reward function.",
    "memorized": "The model memorized its training data.",
    "partly": "Only partly.",
    "no": "No.",
    "worse": "No, the model got worse.",
    "lost": "Yes, but the model later lost the gain.",
    "unknown": "Unknown.",
}


@dataclass(frozen=True, slots=True)
class Learned:
    """Whether a run learned, and the numbers that show it."""

    state: State
    text: str


class Progress:
    """The trends by which a run is judged: the trends of its reward or, if there are no rewards, of its loss."""

    def __init__(self, run: RunData) -> None:
        self.run = run

    @cached_property
    def by_reward(self) -> bool:
        """Whether the run is judged by its reward instead of its loss."""
        return bool(self.run.series("reward").steps)

    @property
    def name(self) -> str:
        """Name of the metric by which the run is judged."""
        return "mean reward" if self.by_reward else "loss"

    @cached_property
    def train(self) -> SeriesTrend | None:
        """Trend of the training reward or loss."""
        return trend_of(self.run.series("reward" if self.by_reward else "loss"))

    @cached_property
    def held_out(self) -> SeriesTrend | None:
        """Trend of the held-out reward or loss, from the first to the last evaluation."""
        series = self.run.series("eval_reward" if self.by_reward else "eval_loss")
        return trend_of(series, noise=self._evaluation_noise(series), width=1)

    def up(self, trend: SeriesTrend | None) -> bool:
        """Return whether a trend is a clear improvement."""
        return trend is not None and (trend.rises if self.by_reward else trend.falls)

    def down(self, trend: SeriesTrend | None) -> bool:
        """Return whether a trend is a clear deterioration."""
        worse = trend is not None and (trend.falls if self.by_reward else trend.rises)
        return worse or (trend is not None and trend is self.held_out and self._fell_and_stayed)

    def best(self, trend: SeriesTrend) -> tuple[float, int]:
        """Return the best value of a trend and its step."""
        return (trend.peak, trend.peak_step) if self.by_reward else (trend.low, trend.low_step)

    def lost(self, trend: SeriesTrend | None) -> bool:
        """Return whether the trend improved clearly, and then lost more than the fraction ``LOST`` of this gain."""
        if trend is None:
            return False
        sign = 1 if self.by_reward else -1
        best, _ = self.best(trend)
        gain, loss = sign * (best - trend.first), sign * (best - trend.last)
        return trend.clear(gain) and trend.clear(loss) and loss > LOST * gain

    @cached_property
    def fell_at_start(self) -> bool:
        """Whether the reward fell right after the first step.

        The trend cannot show this fall: it compares mean rewards at the start and at the end of the run, and the mean at the
        start covers several steps, most of them after the fall.
        """
        train, (steps, values) = self.train, finite(self.run.series("reward"))
        if train is None or len(values) < MIN_STEPS:
            return False
        deviation, samples = (_value_at(self.run.series(key), int(steps[0])) for key in ("reward_std", "samples"))
        if deviation is None or samples is None:
            return False
        error = deviation / math.sqrt(max(samples, 1.0))  # doubled below: answers to one prompt are alike
        return bool(values[0] - max(train.last, values[1 : train.width].mean()) > 2 * CLEAR * error > 0)

    @cached_property
    def _fell_and_stayed(self) -> bool:
        """Whether the later evaluations stay clearly below the first.

        Later evaluations are the second half of all evaluations. All later evaluations must be below the first. Their mean,
        which has less noise than a single evaluation, must be clearly below the first.
        """
        trend, values = self.held_out, finite(self.run.series("eval_reward"))[1]
        later = values[len(values) // 2 :]
        if trend is None or not self.by_reward or len(values) < 4 or not later.max() < values[0]:
            return False
        return trend.clear((values[0] - later.mean()) / math.sqrt((1 + 1 / len(later)) / 2))

    @cached_property
    def flat_since(self) -> int | None:
        """First step whose evaluation differs from all later evaluations by no more than noise.

        None if this step is in the second half of the run, if fewer than three evaluations follow, or if the run is judged by
        its loss.
        """
        trend, (steps, values) = self.held_out, finite(self.run.series("eval_reward"))
        if trend is None or not self.by_reward or len(values) < 4:
            return None
        first = next(index for index in range(len(values)) if abs(values[index:] - values[index]).max() <= trend.noise)
        return int(steps[first]) if first < len(values) - 3 and steps[first] <= steps[-1] / 2 else None

    def _evaluation_noise(self, series: Series) -> float:
        """Return the standard error of the difference of two evaluations.

        For rewards, the result is an upper bound: evaluations use the same prompts, which reduces the actual error.
        """
        values = finite(series)[1]
        if not self.by_reward:
            return LOSS_NOISE * abs(float(values[0])) if len(values) else math.inf
        recorded, count = self.run.series("eval_reward_std").values, self.run.series("eval_samples").values
        low, high = self.run.series("eval_reward_min").values, self.run.series("eval_reward_max").values
        largest = (max(high) - min(low)) / 2 if low and high else math.inf  # possible standard deviation
        deviation = max(recorded[0], recorded[-1]) if recorded else largest
        return deviation * math.sqrt(2 / max(count[-1] if count else 1.0, 1.0))


def _value_at(series: Series, step: int) -> float | None:
    return next((value for at, value in zip(series.steps, series.values, strict=True) if at == step), None)


def learned(progress: Progress) -> Learned:
    """Determine whether a run learned."""
    train, held_out = progress.train, progress.held_out
    text = " ".join(_sentences(progress))
    if train is None and held_out is None:
        return Learned("unknown", f"Fewer than two finite values of the {progress.name} were recorded.")
    if progress.lost(held_out) or (progress.lost(train) and not progress.up(held_out)):
        return Learned("lost", text)
    if progress.down(held_out):
        return Learned("worse", text)
    if confirmed(progress) and (progress.up(held_out) or progress.up(train)):
        return Learned("yes", text)
    if progress.up(train):
        return Learned("partly", f"{text} Held-out data does not confirm the gain.")
    if progress.down(train) or progress.fell_at_start:
        return Learned("worse", text)
    if train is None or train.count < MIN_STEPS:
        return Learned("unknown", f"{text} There are too few steps for a verdict.")
    return Learned("no", text)


def confirmed(progress: Progress) -> bool:
    """Return whether held-out data confirms the change of the training reward or loss.

    True if the held-out reward or loss clearly improves, or if (held-out change) / (training change) is at least
    :data:`FOLLOWS`. Also True if there is no held-out data.
    """
    train, held_out = progress.train, progress.held_out
    if held_out is None or progress.up(held_out):
        return True
    return train is not None and train.change != 0 and held_out.change / train.change >= FOLLOWS


def _sentences(progress: Progress) -> list[str]:
    sentences = []
    if train := progress.train:
        sentences.append(f"The {progress.name} {_verb(progress, train)} {train}{_by(train)}.")
        if progress.lost(train):
            value, step = progress.best(train)
            sentences.append(f"The {progress.name} was best ({short(value)}) around step {step}.")
        elif progress.fell_at_start:
            first = float(finite(progress.run.series("reward"))[1][0])
            sentences.append(f"In the first step, the {progress.name} was {short(first)}.")
    if held_out := progress.held_out:
        subject = f"The {progress.name} on held-out data"
        value, step = progress.best(held_out)
        best = "" if value == held_out.last else f" (best: {short(value)} at step {step})"
        flat = f", flat since step {progress.flat_since}" if progress.up(held_out) and progress.flat_since else ""
        values = f"{short(held_out.first)} to {short(held_out.last)}"
        sentences.append(
            f"{subject} {_verb(progress, held_out)} {values} between the first and the last evaluation{best}{flat}."
        )
    elif progress.by_reward and not progress.run.series("eval_reward").steps:
        sentences.append("There was no held-out evaluation.")
    return sentences + _preferences(progress.run)


def _preferences(run: RunData) -> list[str]:
    parts = [
        f"{where} {values[0]:.0%} at the start and {values[-1]:.0%} at the end"
        for key, where in (("accuracy", "in training"), ("eval_accuracy", "on held-out data"))
        if run.series("accuracy").steps and len(values := finite(run.series(key))[1]) > 1
    ]
    return (
        [f"The model prefers the chosen answer in these fractions of the pairs: {'; '.join(parts)}."] if parts else []
    )


def _verb(progress: Progress, trend: SeriesTrend) -> str:
    if not (progress.up(trend) or progress.down(trend)):
        return "did not clearly change:"
    return "rose from" if trend.change > 0 else "fell from"


def _by(trend: SeriesTrend) -> str:
    if not 0 < trend.noise < math.inf:
        return ""
    times = abs(trend.change) / trend.noise
    return f"; this change is {'' if times > CLEAR else 'only '}{short(times)} times its standard error"
