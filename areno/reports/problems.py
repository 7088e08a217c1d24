"""What is wrong with a run, by its metrics; each problem with one remedy and samples that show it.

The thresholds are those at which a problem explains why a run does not learn, not those at which it becomes noticeable;
:mod:`areno.observability.health` warns earlier, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from areno.observability.health import LOGPROB_GAP_LIMIT
from areno.reports.advice import OptionAdvice
from areno.reports.learning import Progress
from areno.reports.run_data import RunData
from areno.reports.run_samples import Indices, RunSamples
from areno.reports.svg import short
from areno.reports.trends import SeriesTrend, finite, trend_of, window
from areno.storage.metric_columns import Series

TIED = 0.8
"""Fraction of prompts (or steps) with equal rewards above which little is left to learn from."""
TRUNCATED = 0.3
"""Fraction of truncated answers above which the rewards of unfinished answers decide what is learned."""
GROWTH = 10.0
"""Lasting growth of the gradient norm that no change of the batch explains."""
LENGTH_COLLAPSE, LENGTH_EXPLOSION = 0.2, 3.0
"""Change of the answers' length, as a factor, that a task rarely needs."""
ENTROPY_COLLAPSE, ENTROPY_EXPLOSION = 0.1, 2.0
"""Change of the entropy, as a factor: almost deterministic; much less certain than the initial model."""
CLIPPED = 0.3
"""Fraction of clipped tokens above which an update loses much of its gradient; it is usually below 0.1."""
STALE = 4.0
"""Mean staleness in updates from which the samples are those of a clearly different policy."""
FAILED = 0.05
"""Fraction of failed rewards that distorts which answers are learned from."""
EPISODES_FAILED = 0.2
"""Fraction of failed episodes that does; some prompts defeat an agent."""
SHOWN = 3
"""Samples named for a problem."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Something that is wrong.

    Attributes:
        key: short name of the kind of problem.
        text: what is wrong, with numbers.
        remedy: what to change.
        samples: ids ``STEP/PROMPT/SAMPLE`` that show it.
    """

    key: str
    text: str
    remedy: str
    samples: tuple[str, ...] = ()


class Evidence:
    """What the checks look at."""

    def __init__(self, run: RunData) -> None:
        self.run, self.advice, self.samples, self.progress = run, OptionAdvice(run), RunSamples(run), Progress(run)
        self._trends: dict[str, SeriesTrend | None] = {}

    def trend(self, key: str) -> SeriesTrend | None:
        """Trend of one of ``areno.reports.run_data.KEYS``."""
        if key not in self._trends:
            self._trends[key] = trend_of(self.run.series(key))
        return self._trends[key]

    def late(self, key: str) -> float:
        """Mean over the last steps; NaN if it was not recorded."""
        return late_mean(self.run.series(key))

    @cached_property
    def reward_rises(self) -> bool:
        """Whether the training reward clearly rose and stayed up."""
        return self.progress.up(self.progress.train) and not self.progress.lost(self.progress.train)

    @cached_property
    def solved(self) -> bool:
        """Whether the late rewards are close to the highest of the run, which is above the lowest."""
        highs, lows = finite(self.run.series("reward_max"))[1], finite(self.run.series("reward_min"))[1]
        if not len(highs) or not len(lows):
            return False
        high, low = float(highs.max()), float(lows.min())
        return high > low and self.late("reward") >= high - 0.1 * (high - low)

    @cached_property
    def tied(self) -> tuple[float, Indices]:
        """Fraction of late prompts whose answers all have the same reward, and samples of such prompts."""
        if not (self.advice.number("--n-samples") or 1) > 1:
            return 0.0, np.zeros(0, np.int64)
        share, indices = self.samples.tied(self.samples.late)
        recorded = self.late("zero_std_groups")
        return share if math.isnan(recorded) else recorded, indices

    def ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Ids of the first of some samples."""
        return self.samples.ids(indices[:SHOWN])


def late_mean(series: Series) -> float:
    """Mean over the last steps of a series; NaN if it is empty."""
    values = finite(series)[1]
    return float(values[-max(window(len(values)), 1) :].mean()) if len(values) else math.nan


def metric_problems(evidence: Evidence) -> list[RunProblem]:
    """The problems that the metrics of a run show, causes first."""
    problems = [problem for check in CHECKS if (problem := check(evidence)) is not None]
    text = evidence.advice.text
    return [replace(problem, text=text(problem.text), remedy=text(problem.remedy)) for problem in problems]


def _non_finite(evidence: Evidence) -> RunProblem | None:
    bad: set[int] = set()
    for key in ("loss", "grad_norm"):
        steps, values = evidence.run.series(key).arrays()
        bad |= set(steps[~np.isfinite(values)].tolist())
    steps, skipped = evidence.run.series("update_skipped").arrays()
    bad |= set(steps[skipped > 0].tolist())
    if not bad:
        return None
    count = f"{len(bad)} steps, first in step {min(bad)}" if len(bad) > 1 else f"step {min(bad)}"
    return RunProblem(
        "non_finite",
        f"The loss or the gradient was not finite (NaN or infinite) in {count}.",
        f"Start again from the last checkpoint before step {min(bad)} with a lower learning rate, "
        f"{evidence.advice.scaled('--lr', 0.3)}; if it is low already, --dtype float32.",
    )


def _exploding(evidence: Evidence) -> RunProblem | None:
    trend, limit = evidence.trend("grad_norm"), evidence.advice.number("--grad-clip-norm") or 1.0
    if (
        trend is None
        or evidence.reward_rises
        or trend.peak <= max(GROWTH * trend.first, limit)
        or not trend.clear(trend.peak - trend.first)
    ):
        return None
    return RunProblem(
        "exploding",
        f"The gradient norm grew from {short(trend.first)} to {short(trend.peak)} around step {trend.peak_step}, and the "
        f"{evidence.progress.name} did not improve: updates of this size destroy what the model knows.",
        f"Lower the learning rate, {evidence.advice.scaled('--lr', 0.3)}, or --grad-clip-norm.",
    )


def _failed_rewards(evidence: Evidence) -> RunProblem | None:
    errors, samples = evidence.late("reward_errors"), evidence.late("samples")
    share = errors / (errors + samples) if errors + samples > 0 else math.nan
    if not share > FAILED:
        return None
    return RunProblem(
        "reward_errors",
        f"The reward function failed on {share:.0%} of the late samples, which were dropped.",
        "Fix the reward function (--reward-fn-path) for the records that the log names; with "
        f"{'reward.on_error=stop' if evidence.run.is_experiment else '--on-reward-error stop'} the run ends at the first one.",
    )


def _failed_episodes(evidence: Evidence) -> RunProblem | None:
    failed, samples = late_mean(evidence.run.metrics["train/agent_failed"]), evidence.late("samples")
    accepted, lost = (evidence.run.metrics[f"rollout/{name}"].values for name in ("accepted", "failed"))
    share = failed / (failed + samples)
    if accepted and lost and accepted[-1] + lost[-1]:
        share = lost[-1] / (accepted[-1] + lost[-1])
    if not share > EPISODES_FAILED:
        return None
    return RunProblem(
        "episodes_failed",
        f"{share:.0%} of the episodes failed, so the run trains on a selection of its prompts.",
        "Read in the log why they failed, and fix the agent or the workflow.",
    )


def _equal_rewards(evidence: Evidence) -> RunProblem | None:
    low, high = (evidence.run.series(f"reward_{end}").arrays()[1] for end in ("min", "max"))
    if not len(low) or len(low) != len(high) or len(low) < 3:
        return None
    late = slice(-max(window(len(low)), 3), None)
    if float(np.mean(low[late] == high[late])) < TIED:
        return None
    value, always = short(float(high[-1])), float(np.mean(low == high)) >= TIED
    samples = evidence.ids(evidence.samples.spread(evidence.samples.late, SHOWN))
    if evidence.solved and not always:
        return RunProblem(
            "solved",
            f"All late rewards are {value}, the highest of the run: the task is solved, and nothing is left to learn.",
            "Stop here, or take harder problems.",
            samples,
        )
    if (
        evidence.progress.down(evidence.progress.held_out)
        or evidence.progress.fell_at_start
        or evidence.progress.down(evidence.progress.train)
    ):
        return RunProblem(
            "collapsed",
            f"All late rewards are {value}, though the run began with better ones: it lost what the model could do.",
            f"Start again from the initial model or an early checkpoint with a lower learning rate, "
            f"{evidence.advice.scaled('--lr', 0.1)}.",
            samples,
        )
    tests = "Call the reward function (--reward-fn-path) on a correct answer: it should be higher than on a wrong one."
    return RunProblem(
        "equal_rewards",
        f"{'All' if always else 'All late'} rewards are {value}, so all advantages are zero and nothing can be learned.",
        f"{tests} If it is, take easier problems, a better initial model (SFT first) or a larger --n-samples.",
        samples,
    )


def _zero_gradient(evidence: Evidence) -> RunProblem | None:
    norms = finite(evidence.run.series("grad_norm"))[1]
    if len(norms) < 3 or float(np.mean(norms[-max(window(len(norms)), 3) :] == 0)) < TIED or evidence.tied[0] >= TIED:
        return None
    return RunProblem(
        "zero_gradient",
        "The gradient is exactly zero in the late steps, so the weights do not change.",
        "Check that the loss mask selects response tokens, that not all advantages are zero, and that the loss is not clipped "
        "everywhere.",
    )


def _tied_groups(evidence: Evidence) -> RunProblem | None:
    share, indices = evidence.tied
    if share < TIED:
        return None
    cause = "most prompts are solved" if evidence.solved else "most prompts are too hard, or their rewards too coarse"
    easier = (
        "Take easier problems or a finer reward (partial credit), or sample more answers per prompt, "
        f"{evidence.advice.scaled('--n-samples', 2)}."
    )
    return RunProblem(
        "tied_groups",
        f"For {share:.0%} of the late prompts all answers got the same reward, which gives no signal: {cause}.",
        "Take harder problems." if evidence.solved else easier,
        evidence.ids([int(index) for index in indices[::-1]]),
    )


def _truncated(evidence: Evidence) -> RunProblem | None:
    share, length = evidence.late("truncated"), evidence.trend("response_length")
    if not share > TRUNCATED:
        return None
    limit = evidence.advice.number("--max-new-tokens")
    grew = ""
    if length is not None and length.rises and length.last > 1.5 * length.first:
        grew = f" The answers grew from {short(length.first)} to {short(length.last)} tokens."
    latest = evidence.samples.flagged("truncated", evidence.samples.late)[::-1]
    return RunProblem(
        "truncated",
        f"{share:.0%} of the late answers were cut at the limit of {short(limit or math.nan)} tokens, so their rewards are "
        f"those of unfinished answers.{grew}",
        f"Raise the limit, {evidence.advice.scaled('--max-new-tokens', 2)}. If the model never stops, check its "
        "end-of-sequence token and chat template, or teach it to stop with SFT.",
        evidence.ids([int(index) for index in latest]),
    )


def _length_collapse(evidence: Evidence) -> RunProblem | None:
    trend = evidence.trend("response_length")
    if trend is None or not (trend.last <= 1.5 or (trend.falls and trend.last < LENGTH_COLLAPSE * trend.first)):
        return None
    late = evidence.samples.late
    shortest = late[np.argsort(evidence.samples.entries["tokens"][late], kind="stable")]
    return RunProblem(
        "length_collapse",
        f"The answers shrank from {short(trend.first)} to {short(trend.last)} tokens: the model stops almost at once.",
        "Make sure that the reward does not favour short or empty answers, and lower the learning rate, "
        f"{evidence.advice.scaled('--lr', 0.3)}.",
        evidence.ids([int(index) for index in shortest]),
    )


def _length_explosion(evidence: Evidence) -> RunProblem | None:
    trend, held_out = evidence.trend("response_length"), evidence.progress.held_out
    if (
        trend is None
        or not trend.rises
        or trend.last < LENGTH_EXPLOSION * trend.first
        or evidence.progress.up(held_out)
    ):
        return None
    late = evidence.samples.late
    longest = late[np.argsort(evidence.samples.entries["tokens"][late], kind="stable")][::-1]
    return RunProblem(
        "length_explosion",
        f"The answers grew from {short(trend.first)} to {short(trend.last)} tokens, and no evaluation shows that this helps.",
        "Read the longest answers. If they are padded, subtract a penalty for length in the reward, and add "
        f"{evidence.advice.kl}.",
        evidence.ids([int(index) for index in longest]),
    )


def _entropy(evidence: Evidence) -> RunProblem | None:
    trend = evidence.trend("entropy")
    if trend is None or not evidence.progress.by_reward or evidence.solved:
        return None
    values = f"from {short(trend.first)} to {short(trend.last)} nats"
    if trend.falls and trend.last < ENTROPY_COLLAPSE * trend.first:
        return RunProblem(
            "entropy_collapse",
            f"The entropy fell {values} before the task was solved: the model always gives the same answer and explores "
            "no others.",
            f"Lower the learning rate, {evidence.advice.scaled('--lr', 0.3)}, and keep the policy close to the initial model "
            f"with {evidence.advice.kl}; --clip-eps-high 0.28 lets unlikely tokens gain more.",
            evidence.ids(evidence.samples.spread(evidence.samples.late, SHOWN)),
        )
    if trend.rises and trend.last > ENTROPY_EXPLOSION * trend.first and not evidence.reward_rises:
        return RunProblem(
            "entropy_explosion",
            f"The entropy rose {values} while the reward did not: the answers are becoming random.",
            f"Lower the learning rate, {evidence.advice.scaled('--lr', 0.3)}, and add {evidence.advice.kl}.",
            evidence.ids(evidence.samples.spread(evidence.samples.late, SHOWN)),
        )
    return None


def _logprob_gap(evidence: Evidence) -> RunProblem | None:
    gap = evidence.late("logprob_gap")
    warned = any("train log-prob" in str(warning.get("text")) for warning in evidence.run.warnings)
    stale = evidence.late("staleness") > 0  # those samples legitimately differ from the trained policy
    if stale or not (gap > LOGPROB_GAP_LIMIT or warned):
        return None
    return RunProblem(
        "logprob_gap",
        f"Log-probs when sampling and when training differ by {short(gap)} on average, more than rounding explains: the "
        "policy that is trained is not the one that sampled.",
        "--dtype float32 if the gap is there from the first step; otherwise fewer optimizer steps per batch (omit "
        "--gradient-accumulation-steps), or a lower --lr.",
    )


def _staleness(evidence: Evidence) -> RunProblem | None:
    lag = evidence.late("staleness")
    if not lag > STALE or evidence.reward_rises:
        return None
    return RunProblem(
        "stale",
        f"The late samples are {short(lag)} updates old on average, so they are those of a clearly different policy.",
        f"Lower --max-staleness to 1 (now {short(evidence.advice.number('--max-staleness') or math.nan)}), or add rollout "
        "replicas.",
    )


def _clipped(evidence: Evidence) -> RunProblem | None:
    share = evidence.late("clip_fraction")
    if not share > CLIPPED or evidence.reward_rises:
        return None
    return RunProblem(
        "clipped",
        f"{share:.0%} of the late tokens or answers are outside the clip range and get no gradient: each update moves the "
        "policy too far.",
        f"Lower the learning rate, {evidence.advice.scaled('--lr', 0.3)}, or take fewer passes over a batch "
        "(--update-epochs 1).",
    )


def _overfitted(evidence: Evidence) -> RunProblem | None:
    train, held_out = evidence.trend("loss"), trend_of(evidence.run.series("eval_loss"), noise=0.0, width=1)
    if evidence.progress.by_reward or train is None or held_out is None or train.change >= 0:
        return None
    rise = held_out.last / held_out.low - 1 if held_out.low > 0 else 0.0
    if rise < 0.02:  # ten times the noise of such a loss
        return None
    return RunProblem(
        "overfitted",
        f"The held-out loss was lowest with {short(held_out.low)} at step {held_out.low_step} and rose to "
        f"{short(held_out.last)} while the training loss fell to {short(train.last)}: the model memorizes its data.",
        f"Train for fewer epochs (--epochs, now {short(evidence.advice.number('--epochs') or math.nan)}) or on more data, with "
        "--keep-best and --early-stop-patience 3.",
    )


def _diverged(evidence: Evidence) -> RunProblem | None:
    train = evidence.trend("loss")
    if evidence.progress.by_reward or train is None or not train.rises:
        return None
    return RunProblem(
        "diverged",
        f"The training loss rose: {train}.",
        f"Lower the learning rate, {evidence.advice.scaled('--lr', 0.1)}.",
    )


def _displaced(evidence: Evidence) -> RunProblem | None:
    chosen = evidence.trend("chosen_reward")
    if chosen is None or not chosen.falls or chosen.last > -1.0:  # beta times nats below the reference
        return None
    return RunProblem(
        "displaced",
        f"The chosen answers became less likely too: their reward fell to {short(chosen.last)}. Only the margin to the "
        "rejected ones improves, so the model may answer with neither.",
        f"Lower the learning rate, {evidence.advice.scaled('--lr', 0.3)}, or run SFT on the chosen answers first.",
    )


CHECKS: tuple[Callable[[Evidence], RunProblem | None], ...] = (
    *(_non_finite, _exploding, _failed_rewards, _failed_episodes, _equal_rewards, _zero_gradient, _truncated),
    *(_length_collapse, _length_explosion, _entropy, _logprob_gap, _staleness, _clipped),
    *(_diverged, _overfitted, _displaced, _tied_groups),
)
"""The checks, in the order in which their problems are listed."""
