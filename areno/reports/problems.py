"""Detects problems of a run from its metrics.

Each problem has one remedy and, if possible, samples that show the problem. A problem is reported only if it explains
why a run does not learn. :mod:`areno.observability.health` checks each step and warns earlier.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from areno.observability.health import LOGPROB_GAP_LIMIT, gap_remedy
from areno.reports.evidence import TIED, Evidence, RunProblem, late_mean
from areno.reports.overfitting import against_evaluation, memorized, overfitted
from areno.reports.reward_problems import equal_rewards, tied_groups, truncated
from areno.reports.run_samples import Indices
from areno.reports.svg import short
from areno.reports.trends import finite, window

GROWTH = 10.0
"""The gradient norm is exploding if it exceeds this multiple of its initial value.

Growth by a smaller factor may be due to differences between batches.
"""
LENGTH_COLLAPSE, LENGTH_EXPLOSION = 0.2, 3.0
"""Limits for the length of the answers, as multiples of the initial length.

Below ``LENGTH_COLLAPSE``, the length has collapsed. Above ``LENGTH_EXPLOSION``, the length has exploded. A task rarely
requires such a change of the length.
"""
ENTROPY_COLLAPSE, ENTROPY_EXPLOSION = 0.1, 2.0
"""Multiples of the initial entropy: below the first, the entropy has collapsed; above the second, it has exploded.

A collapsed policy is almost deterministic. An exploded policy is much less certain than at the start.
"""
CLIPPED = 0.3
"""Fraction of clipped tokens above which an update loses much of its gradient. The fraction is usually below 0.1."""
STALE = 4.0
"""Mean staleness, in updates, above which samples come from a clearly different policy."""
FAILED = 0.05
"""Fraction of answers whose reward computation failed, above which the failures are reported.

These answers are dropped, so the run trains on a biased selection of its answers.
"""
EPISODES_FAILED = 0.2
"""Fraction of failed episodes above which failures are reported.

Fewer failures are normal, because agents usually fail on some prompts.
"""
_GAP_WARNING = re.compile(r"train log-prob\| is .*?, above ([\d.e-]+):")
"""Pattern of the health warning about the log-prob gap. Its group captures the limit above which the run warned."""


def metric_problems(evidence: Evidence) -> list[RunProblem]:
    """Return the problems that the metrics of a run show. Causes are listed before their effects."""
    problems = [problem for check in CHECKS if (problem := check(evidence)) is not None]
    text = evidence.advice.text
    return [replace(problem, text=text(problem.text), remedy=text(problem.remedy)) for problem in problems]


def _non_finite(evidence: Evidence) -> RunProblem | None:
    bad: set[int] = set()
    scaled = bool(evidence.run.series("loss_scale").steps)  # updates that overflow are skipped until the scale fits
    for key in ("loss",) if scaled else ("loss", "grad_norm"):
        steps, values = evidence.run.series(key).arrays()
        bad |= set(steps[~np.isfinite(values)].tolist())
    if not bad:
        return None
    count = f"{len(bad)} steps, first in step {min(bad)}" if len(bad) > 1 else f"step {min(bad)}"
    return RunProblem(
        "non_finite",
        f"The loss or the gradient was not finite (NaN or infinite) in {count}.",
        f"Start again from the last checkpoint before step {min(bad)} with a lower learning rate, "
        f"{evidence.advice.scaled('--lr', 0.3)}; if the learning rate is low already, use --dtype float32.",
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
        f"{evidence.progress.name} did not improve: updates of this size damage the model.",
        f"Lower --grad-clip-norm or the learning rate: {evidence.advice.scaled('--lr', 0.3)}.",
    )


def _failed_rewards(evidence: Evidence) -> RunProblem | None:
    errors, samples = evidence.late("reward_errors"), evidence.late("samples")
    share = errors / (errors + samples) if errors + samples > 0 else math.nan
    if not share > FAILED:
        return None
    return RunProblem(
        "reward_errors",
        f"In the last steps, the reward function failed on {share:.0%} of the samples, which were dropped.",
        "Fix the reward function (--reward-fn-path) for the records that the log lists. To stop a run at the first failure, "
        f"use {'reward.on_error=stop' if evidence.run.is_experiment else '--on-reward-error stop'}.",
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
        f"{share:.0%} of the episodes failed, so the run trains only on a subset of its prompts.",
        "Find the reasons in the log, and fix the agent or the workflow.",
    )


def _zero_gradient(evidence: Evidence) -> RunProblem | None:
    norms = finite(evidence.run.series("grad_norm"))[1]
    if len(norms) < 3 or float(np.mean(norms[-max(window(len(norms)), 3) :] == 0)) < TIED or evidence.tied[0] >= TIED:
        return None
    return RunProblem(
        "zero_gradient",
        "The gradient is exactly zero in the last steps, so the weights do not change.",
        "Check that the loss mask selects response tokens, that some advantages are not zero, and that the loss does not clip "
        "every token.",
    )


def _length_collapse(evidence: Evidence) -> RunProblem | None:
    trend = evidence.trend("response_length")
    if trend is None or not trend.falls or trend.last >= trend.first * (0.5 if trend.last <= 1.5 else LENGTH_COLLAPSE):
        return None
    return RunProblem(
        "length_collapse",
        f"The mean length of the answers is {short(trend.last)} tokens in the last steps; it was {short(trend.first)} in the "
        "first steps.",
        "Make sure that the reward does not favor short or empty answers, and lower the learning rate: "
        f"{evidence.advice.scaled('--lr', 0.3)}.",
        evidence.ids(_late_by_length(evidence)),
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
    return RunProblem(
        "length_explosion",
        f"The answers grew from {short(trend.first)} to {short(trend.last)} tokens, and no evaluation shows that "
        "longer answers help.",
        f"Read the longest answers. If they are longer than necessary, add {evidence.advice.kl}, and subtract a length "
        "penalty from the reward.",
        evidence.ids(_late_by_length(evidence)[::-1]),
    )


def _late_by_length(evidence: Evidence) -> Indices:
    late = evidence.samples.late
    return late[np.argsort(evidence.samples.entries["tokens"][late], kind="stable")]


def _entropy(evidence: Evidence) -> RunProblem | None:
    trend = evidence.trend("entropy")
    if trend is None or not evidence.progress.by_reward or evidence.solved:
        return None
    values = f"from {short(trend.first)} to {short(trend.last)} nats"
    if trend.falls and trend.last < ENTROPY_COLLAPSE * trend.first:
        return RunProblem(
            "entropy_collapse",
            f"The entropy fell {values} although the task is not solved: the model gives nearly the same answer each time "
            "and hardly explores.",
            f"Lower the learning rate with {evidence.advice.scaled('--lr', 0.3)}, and keep the policy close to the initial "
            f"model with {evidence.advice.kl}. Also try {evidence.advice.assign('--clip-eps-high', 0.28)}: unlikely tokens can "
            "then gain more probability.",
            evidence.spread(),
        )
    if trend.rises and trend.last > ENTROPY_EXPLOSION * trend.first and not evidence.reward_rises:
        return RunProblem(
            "entropy_explosion",
            f"The entropy rose {values} while the reward did not rise: the answers are becoming random.",
            f"Lower the learning rate with {evidence.advice.scaled('--lr', 0.3)}, and add {evidence.advice.kl}.",
            evidence.spread(),
        )
    return None


def _logprob_gap(evidence: Evidence) -> RunProblem | None:
    gap = evidence.late("logprob_gap")
    warned = [match for warning in evidence.run.warnings if (match := _GAP_WARNING.search(str(warning.get("text"))))]
    limit = float(warned[-1][1]) if warned else LOGPROB_GAP_LIMIT  # lower in fp32
    stale = evidence.late("staleness") > 0  # those samples legitimately differ from the trained policy
    if stale or not gap > limit:
        return None
    return RunProblem(
        "logprob_gap",
        f"Log-probs of rollout and training differ by {short(gap)} on average, which is more than rounding explains: "
        "the trained policy is not the sampling policy.",
        f"{gap_remedy(limit)}.",
    )


def _staleness(evidence: Evidence) -> RunProblem | None:
    lag = evidence.late("staleness")
    if not lag > STALE or evidence.reward_rises:
        return None
    return RunProblem(
        "stale",
        f"The samples of the last steps are {short(lag)} updates old on average, so they come from a clearly different policy.",
        f"Lower --max-staleness to 1 (now {short(evidence.advice.number('--max-staleness') or math.nan)}).",
    )


def _clipped(evidence: Evidence) -> RunProblem | None:
    share = evidence.late("clip_fraction")
    if not share > CLIPPED or evidence.reward_rises:
        return None
    return RunProblem(
        "clipped",
        f"In the last steps, {share:.0%} of the tokens (with GSPO: of the answers) are outside the clip range and get no "
        "gradient: each update moves the policy too far.",
        f"Lower the learning rate with {evidence.advice.scaled('--lr', 0.3)}, or take fewer passes over a batch "
        "(--update-epochs 1).",
    )


def _diverged(evidence: Evidence) -> RunProblem | None:
    train = evidence.trend("loss")
    if evidence.progress.by_reward or train is None or not train.rises:
        return None
    return RunProblem(
        "diverged",
        f"The training loss rose from {train}.",
        f"Lower the learning rate: {evidence.advice.scaled('--lr', 0.1)}.",
    )


def _displaced(evidence: Evidence) -> RunProblem | None:
    chosen = evidence.trend("chosen_reward")
    if chosen is None or not chosen.falls or chosen.last > -1.0:  # beta times nats below the reference
        return None
    return RunProblem(
        "displaced",
        f"The chosen answers became less likely too: their reward fell to {short(chosen.last)}. Only the margin to "
        "the rejected answers improves, so the model may give neither the chosen nor the rejected answers.",
        f"Lower the learning rate with {evidence.advice.scaled('--lr', 0.3)}, or run SFT on the chosen answers first.",
    )


CHECKS: tuple[Callable[[Evidence], RunProblem | None], ...] = (
    *(_non_finite, _exploding, _failed_rewards, _failed_episodes, equal_rewards, _zero_gradient, truncated),
    *(_length_collapse, _length_explosion, _entropy, _logprob_gap, _staleness, _clipped),
    *(_diverged, overfitted, memorized, against_evaluation, _displaced, tied_groups),
)
"""All checks. A check for a cause precedes the checks for its effects."""
