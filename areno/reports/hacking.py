"""Detects signs that a policy exploits its reward.

The signs are reward parts that move in opposite directions, repetitive answers, and equal answers to different prompts.
Answers from the last steps count as a sign only if their rewards exceed the mean reward at the start of the run. Several signs
are reported as one problem.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from areno.reports.evidence import Evidence, RunProblem, number
from areno.reports.reward_problems import REPETITIVE
from areno.reports.run_samples import completions, distinct_share
from areno.reports.svg import short
from areno.reports.trends import SeriesTrend, falls_at_start, trend_of

AT_COST = 0.2
"""Minimum fall of a reward part that indicates exploitation of the reward, as a fraction of the part's initial value.

A policy that exploits its reward can raise one part of the reward at the cost of another part.
"""
MOST = 0.5
"""Minimum fraction of repetitive answers that indicates exploitation of the reward.

The fraction counts only the best-rewarded answers of the last steps. The same minimum applies to answers with equal texts.
"""
MORE = 0.3
"""Minimum increase of the fraction of repetitive answers, from the first to the last steps of the run.

Answers that are repetitive from the start are due to the model or the task, and do not indicate exploitation of the reward. The
same minimum applies to answers with equal texts.
"""
SHORT_ANSWER = 20
"""Maximum length, in characters, of short answers such as yes or no.

Many prompts may have the same correct short answer. So ``NEARLY_ALL`` replaces ``MOST`` as the minimum fraction of equal
answers if the answers are short.
"""
NEARLY_ALL = 0.9
"""Minimum fraction of equal short answers that indicates exploitation of the reward.

The fraction counts only the best-rewarded answers of the last steps. ``SHORT_ANSWER`` is the maximum length of a short answer.
"""


@dataclass(frozen=True, slots=True)
class _Sign:
    key: str
    seen: str
    meaning: str
    remedy: str
    samples: tuple[str, ...]


def hacking_problems(evidence: Evidence) -> list[RunProblem]:
    """Return the signs of an exploited reward as one problem; [] if there are no signs.

    The text of the problem describes all signs. The other fields are those of the most important sign. In order of
    importance, the signs are reward parts that move in opposite directions, repetitive answers, and equal answers to different
    prompts.
    """
    repetitive = _repetitive(evidence)
    candidates = (_opposed_parts(evidence, repeats=repetitive is not None), repetitive, _identical(evidence))
    signs = [sign for sign in candidates if sign is not None]
    if not signs:
        return []
    first, text = signs[0], evidence.advice.text
    seen = " ".join(sign.seen for sign in signs)
    return [RunProblem(first.key, text(f"{seen} {first.meaning}"), text(first.remedy), first.samples)]


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    trend: SeriesTrend
    weight: float
    falls: bool

    def __str__(self) -> str:
        return f"`{self.name}` (weight {short(self.weight)}, mean from {short(self.trend.first)} to {short(self.trend.last)})"


def _opposed_parts(evidence: Evidence, repeats: bool) -> _Sign | None:
    """Return a sign of reward hacking if a part of the reward falls while another part and the total reward rise.

    A falling part is ignored if its initial value is not above 0.
    """
    parts = [
        _Part(name, trend, evidence.advice.weight(name), trend.falls or falls_at_start(series))
        for name, series in evidence.run.reward_parts().items()
        if (trend := trend_of(series))
    ]
    rising = [part for part in parts if part.trend.rises and part.weight]
    falling = [part for part in parts if part.falls and -part.trend.change > AT_COST * part.trend.first > 0]
    if not rising or not falling or not evidence.progress.up(evidence.progress.train):
        return None
    up = max(rising, key=lambda part: part.weight * part.trend.change)
    down = max(falling, key=lambda part: -part.trend.change / part.trend.first)
    once = ", for example by counting a repeated phrase only once" if repeats else ""
    close, change = f"close the loophole in `{up.name}`{once}", f"(--reward-weights {down.name}=...)"
    remedy = (
        f"Read the samples and {close}. If you want `{down.name}` to rise, also raise its weight {change}"
        if down.weight
        else f"If you want `{down.name}` to rise, give it a weight above 0 {change}. Read the samples and {close}"
    )
    return _Sign(
        "opposed_parts",
        f"The reward rises because of its part {up}, while the part {down} falls.",
        f"The policy may exploit `{up.name}`." if down.weight else _unrewarded(up, down),
        f"{remedy}; then train again from the initial model.",
        _with_parts(evidence, up.name, down.name),
    )


def _unrewarded(up: _Part, down: _Part) -> str:
    return f"With weight 0, `{down.name}` is recorded but not rewarded, so training raises only `{up.name}`."


def _with_parts(evidence: Evidence, high: str, low: str) -> tuple[str, ...]:
    samples = evidence.samples

    def difference(index: int) -> float:
        parts = samples.texts(index).get("reward_parts", {})
        return number(parts.get(high)) - number(parts.get(low))

    return evidence.ids(sorted(samples.spread(samples.late), key=difference, reverse=True))


def _best_answers(evidence: Evidence, late: bool) -> tuple[list[int], list[str]]:
    """Select the best-rewarded answers of the first or the last steps, with their texts.

    In each step, the best answer to each recorded prompt is a candidate. The reward of a selected answer must be at least
    the median of the candidates. In the last steps, the reward must also exceed the mean reward at the start of the run. If
    more than ``run_samples.CHECKED`` answers remain, ``CHECKED`` of them are selected, evenly spaced in the order of recording.
    """
    samples, train = evidence.samples, evidence.progress.train
    among = samples.flagged("best", samples.late if late else samples.early)
    if len(among):
        among = among[samples.rewards[among] >= np.nanmedian(samples.rewards[among])]
    if late and train is not None and evidence.progress.by_reward:
        among = among[samples.rewards[among] > train.first]
    indices = samples.spread(among)
    return indices, completions(samples, indices)


def _repetitive(evidence: Evidence) -> _Sign | None:
    indices, late = _best_answers(evidence, late=True)
    repeated = [distinct_share(text) < REPETITIVE for text in late]
    share = sum(repeated) / len(late) if late else 0.0
    if share < MOST:
        return None
    _, early = _best_answers(evidence, late=False)
    before = sum(distinct_share(text) < REPETITIVE for text in early) / max(len(early), 1)
    if share - before < MORE:
        return None
    return _Sign(
        "repetitive",
        f"{share:.0%} of the best-rewarded answers in the last steps repeat themselves (at the start: {before:.0%}).",
        "Repetition seems to increase the reward.",
        "Make the reward ignore or punish repetition, for example by counting a repeated phrase only once; then train again "
        "from the initial model.",
        evidence.ids([index for index, flag in zip(indices, repeated, strict=True) if flag][::-1]),
    )


def _identical(evidence: Evidence) -> _Sign | None:
    samples = evidence.samples
    indices, late = _best_answers(evidence, late=True)
    if len({samples.texts(index).get("prompt") for index in indices}) < 4:
        return None
    (answer, count), *_ = Counter(late).most_common(1)
    share = count / len(late)
    _, early = _best_answers(evidence, late=False)
    before = Counter(early).most_common(1)[0][1] / len(early) if early else 0.0
    if share < (MOST if len(answer) > SHORT_ANSWER else NEARLY_ALL) or share - before < MORE:
        return None
    shown = answer if len(answer) <= 60 else answer[:59] + "…"
    return _Sign(
        "identical",
        f"In the last steps, {share:.0%} of the best-rewarded answers are the same text for different prompts: {shown!r}. At "
        f"the start, the most frequent answer made up {before:.0%} of the best-rewarded answers.",
        "The reward is high for this text, regardless of the prompt.",
        "Make the reward depend on the prompt, so that one text cannot be right for all prompts. If the reward "
        f"already depends on the prompt, raise --temperature, and add {evidence.advice.kl}.",
        evidence.ids([index for index, text in zip(indices, late, strict=True) if text == answer][::-1]),
    )
