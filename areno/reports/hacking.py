"""Signs that a policy exploits its reward: parts against each other, training against evaluation, and uniform answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from areno.reports.problems import SHOWN, Evidence, RunProblem
from areno.reports.run_samples import completions, distinct_share
from areno.reports.svg import short
from areno.reports.trends import SeriesTrend, trend_of

REPETITIVE = 0.3
"""A text is repetitive if a smaller fraction than this of its four-character sequences is distinct; prose: about 0.8."""
AT_COST = 0.2
"""A falling reward part counts as a cost only if it has lost more than this fraction of its initial value."""
MOST = 0.5
"""Fraction of the best answers that must be repetitive, or identical, before it counts."""
MORE = 0.3
"""By how much that fraction must have grown since the start; what is so from the start is due to the model or the task."""
SHORT_ANSWER = 20
"""Length in characters up to which equal answers, such as yes or no, are normal unless nearly all answers are equal."""
NEARLY_ALL = 0.9


def hacking_problems(evidence: Evidence) -> list[RunProblem]:
    """Signs of an exploited reward, the most specific first."""
    problems = [check(evidence) for check in (_opposed_parts, _against_evaluation, _repetitive, _identical)]
    return [problem for problem in problems if problem is not None]


@dataclass(frozen=True, slots=True)
class _PartTrend:
    name: str
    trend: SeriesTrend


def _opposed_parts(evidence: Evidence) -> RunProblem | None:
    """A part of the reward rises while another falls, and the reward as a whole rises."""
    parts = [
        _PartTrend(name, trend) for name, series in evidence.run.reward_parts().items() if (trend := trend_of(series))
    ]
    rising = [part for part in parts if part.trend.rises]
    falling = [part for part in parts if part.trend.falls and -part.trend.change > AT_COST * abs(part.trend.first)]
    if not rising or not falling or not evidence.progress.up(evidence.progress.train):
        return None
    up = max(rising, key=lambda part: part.trend.change)
    down = min(falling, key=lambda part: part.trend.change)
    return RunProblem(
        "opposed_parts",
        f"The reward rises by its part `{up.name}` ({up.trend}) at the cost of `{down.name}` ({down.trend}): the policy may "
        f"exploit `{up.name}`.",
        f"Read the samples; then fix what `{up.name}` rewards, or lower its weight, --reward-weights "
        f"{up.name}=..., so that `{down.name}` counts more.",
        _with_parts(evidence, up.name, down.name),
    )


def _with_parts(evidence: Evidence, high: str, low: str) -> tuple[str, ...]:
    """Late samples with the largest difference of two parts."""
    samples = evidence.samples

    def difference(index: int) -> float:
        parts = samples.texts(index).get("reward_parts", {})
        return _number(parts.get(high)) - _number(parts.get(low))

    return evidence.ids(sorted(samples.spread(samples.late), key=difference, reverse=True))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _against_evaluation(evidence: Evidence) -> RunProblem | None:
    """The training reward rises while the evaluation falls, from its start or from its best value."""
    train, held_out = evidence.progress.train, evidence.progress.held_out
    if not evidence.progress.by_reward or train is None or held_out is None or not evidence.reward_rises:
        return None
    if not held_out.clear(held_out.peak - held_out.last):
        return None
    late = evidence.samples.late
    return RunProblem(
        "against_evaluation",
        f"The training reward rose ({train}), but the evaluation fell from {short(held_out.peak)} at step "
        f"{held_out.peak_step} to {short(held_out.last)}: what is rewarded in training is not what is evaluated, or the "
        "policy has specialized in its training prompts.",
        f"Read the best-rewarded samples for a loophole in the reward and close it; without one, stop at the best evaluation "
        f"(--keep-best, --early-stop-patience 3) and add {evidence.advice.kl}.",
        evidence.ids(evidence.samples.extremes(SHOWN, highest=True, among=late)),
    )


def _best_answers(evidence: Evidence, late: bool) -> tuple[list[int], list[str]]:
    """The best answer to each early or late prompt; of these, those with at least the median reward."""
    samples = evidence.samples
    among = samples.flagged("best", samples.late if late else samples.early)
    if len(among):
        among = among[samples.rewards[among] >= np.nanmedian(samples.rewards[among])]
    indices = samples.spread(among)
    return indices, completions(samples, indices)


def _repetitive(evidence: Evidence) -> RunProblem | None:
    indices, late = _best_answers(evidence, late=True)
    repeated = [distinct_share(text) < REPETITIVE for text in late]
    share = sum(repeated) / len(late) if late else 0.0
    if share < MOST:
        return None
    _, early = _best_answers(evidence, late=False)
    before = sum(distinct_share(text) < REPETITIVE for text in early) / max(len(early), 1)
    if share - before < MORE:
        return None
    return RunProblem(
        "repetitive",
        f"{share:.0%} of the best-rewarded late answers repeat themselves (at the start {before:.0%}): the reward counts "
        "something that repetition produces.",
        "Make the reward ignore or punish repetition, for example by counting each match once; then train again from the "
        "initial model.",
        evidence.ids([index for index, flag in zip(indices, repeated, strict=True) if flag][::-1]),
    )


def _identical(evidence: Evidence) -> RunProblem | None:
    """Different prompts get the same answer."""
    samples = evidence.samples
    indices, late = _best_answers(evidence, late=True)
    if len({samples.texts(index).get("prompt") for index in indices}) < 4:
        return None
    (answer, count), *_ = Counter(late).most_common(1)
    share = count / len(late)
    _, early = _best_answers(evidence, late=False)
    before = Counter(early).most_common(1)[0][1] / len(early)
    if share < (MOST if len(answer) > SHORT_ANSWER else NEARLY_ALL) or share - before < MORE:
        return None
    shown = answer if len(answer) <= 60 else answer[:59] + "…"
    return RunProblem(
        "identical",
        f"{share:.0%} of the best-rewarded late answers are the same text for different prompts: {shown!r} (at the start the "
        f"most frequent one had {before:.0%}).",
        "Make the reward depend on the prompt, so that one text cannot be right for all; if it does already, raise "
        f"--temperature, and add {evidence.advice.kl}.",
        evidence.ids([index for index, text in zip(indices, late, strict=True) if text == answer][::-1]),
    )
