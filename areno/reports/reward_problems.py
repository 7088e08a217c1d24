"""Detects problems of the rewards.

Examples: the rewards are equal, unfinished answers are scored, the reward has collapsed, or the total reward is high although
one of its parts is low.
"""

from __future__ import annotations

import math

import numpy as np

from areno.reports.evidence import TIED, Evidence, RunProblem, late_mean
from areno.reports.run_samples import completions, distinct_share
from areno.reports.svg import short
from areno.reports.trends import CLEAR, window

TRUNCATED = 0.3
"""If more than this fraction of the answers is truncated, the report examines whether truncation lowers the reward."""
REPETITIVE = 0.3
"""A text is repetitive if less than this fraction of its four-character sequences are distinct.

In prose, the fraction is about 0.8.
"""
BELOW_BREAK = 0.1
"""After a collapse of the reward, the advice is to multiply the learning rate by this factor."""


def equal_rewards(evidence: Evidence) -> RunProblem | None:
    """Detect that nearly all rewards in the last steps are equal."""
    low, high = (evidence.run.series(f"reward_{end}").arrays()[1] for end in ("min", "max"))
    if not len(low) or len(low) != len(high) or len(low) < 3:
        return None
    late = slice(-max(window(len(low)), 3), None)
    usual = np.sort(high[late])[len(high[late]) // 2]  # that of most steps, if the rewards of most steps are equal
    equal = (low == usual) & (high == usual)
    if float(np.mean(equal[late])) < TIED:
        return None
    value, always = short(float(usual)), float(np.mean(equal)) >= TIED
    progress = evidence.progress
    if evidence.at_highest and not always:
        return _solved(evidence, value)
    if progress.down(progress.held_out) or progress.fell_at_start or progress.down(progress.train):
        return _collapsed(evidence, value)
    return _nothing_to_learn(evidence, value, always)


def _solved(evidence: Evidence, value: str) -> RunProblem:
    if evidence.neglected:
        return _neglected(evidence, f"Nearly all rewards in the last steps are {value}, the highest reward of the run")
    return RunProblem(
        "solved",
        f"Nearly all rewards in the last steps are {value}, the highest reward of the run: the task is solved, and there is "
        "nothing left to learn.",
        "Stop the run, or use harder problems.",
        evidence.spread(),
    )


def _neglected(evidence: Evidence, seen: str) -> RunProblem:
    part, weight = evidence.neglected, evidence.advice.weight(evidence.neglected)
    late = short(late_mean(evidence.run.reward_parts()[part]))
    return RunProblem(
        "neglected",
        f"{seen}, but the reward part `{part}` is only {late} on average. With a weight of {short(weight)}, `{part}` has "
        f"{'too little' if weight else 'no'} influence on the total reward.",
        f"If `{part}` should be higher, raise its weight (--reward-weights {part}=...) and train again from the initial model.",
        evidence.spread(),
    )


def _collapsed(evidence: Evidence, value: str) -> RunProblem:
    step, final = evidence.broke, evidence.advice.number("--lr")
    rate = evidence.rate_at(step)
    when = f" The reward collapsed at step {step}" if step is not None else ""
    if when and rate is not None:
        warming = f", during the warm-up to {short(final)}" if final and rate < 0.99 * final else ""
        when += f", at a learning rate of {short(rate)}{warming}"
    return RunProblem(
        "collapsed",
        f"In the last steps, nearly all rewards are {value}, although the first rewards were better: the model no longer "
        f"solves the task.{when + '.' if when else ''}",
        "Start again from the initial model or an earlier checkpoint with a much lower learning rate: "
        f"{evidence.lower_rate(step, BELOW_BREAK)}.",
        evidence.spread(),
    )


def _nothing_to_learn(evidence: Evidence, value: str, always: bool) -> RunProblem:
    all_of_them, cut = "all rewards" if always else "all rewards in the last steps", evidence.late("truncated")
    if cut >= TIED:
        return RunProblem(
            "cut_off",
            f"{cut:.0%} of the answers in the last steps were truncated at {_limit(evidence)}, and {all_of_them} are {value}, "
            "probably because no answer is complete.",
            f"{_raise_limit(evidence)} If all rewards are still equal afterwards, test the reward function (--reward-fn-path) "
            "on a correct answer.",
            _cut_answers(evidence),
        )
    return RunProblem(
        "equal_rewards",
        f"{all_of_them.capitalize()} are {value}, so all advantages are zero and nothing can be learned.",
        "Test the reward function (--reward-fn-path): a correct answer should get a higher reward than a wrong answer. If "
        "only some of the listed samples are correct, the reward function is wrong. If all of them are correct, use harder "
        "problems. If none of them is correct, use easier problems, a better initial model (SFT first) or a larger "
        "--n-samples.",
        evidence.spread(),
    )


def tied_groups(evidence: Evidence) -> RunProblem | None:
    """Detect that, for most prompts, all answers have the same reward."""
    share, indices = evidence.tied
    if share < TIED:
        return None
    seen = f"For {share:.0%} of the prompts in the last steps, all answers got the same reward"
    if evidence.at_highest and evidence.neglected:
        return _neglected(evidence, f"{seen}, and the rewards are close to the highest reward of the run")
    cause = (
        "most prompts are solved" if evidence.solved else "most prompts are too hard, or their rewards are too coarse"
    )
    easier = (
        "Use easier problems or a finer-grained reward (partial credit), or sample more answers per prompt: "
        f"{evidence.advice.scaled('--n-samples', 2)}."
    )
    return RunProblem(
        "tied_groups",
        f"{seen}, so these prompts give no learning signal: {cause}.",
        "Use harder problems." if evidence.solved else easier,
        evidence.ids(indices[::-1]),
    )


def truncated(evidence: Evidence) -> RunProblem | None:
    """Detect that many answers in the last steps are truncated at the limit."""
    share, length, cut = evidence.late("truncated"), evidence.trend("response_length"), evidence.trend("truncated")
    if not share > TRUNCATED:
        return None
    grew = ""
    if length is not None and length.rises and length.last > 1.5 * length.first:
        grew = f" The answers grew from {short(length.first)} to {short(length.last)} tokens."
    seen = f"{share:.0%} of the answers in the last steps were truncated at {_limit(evidence)}"
    if _costs_reward(evidence):
        text, remedy = f"{seen}, so the reward function scored unfinished answers.{grew}", _raise_limit(evidence)
    elif cut is not None and cut.rises:
        text = (
            f"{seen}, but truncation does not lower their reward, so the model has no reason to end its answers.{grew}"
        )
        remedy = (
            "If the model should end its answers, make the reward function return a low reward for truncated answers, which "
            'have `record.metadata["finish_reason"] == "length"`. Do not raise the limit: with a higher limit, the answers '
            "would only become longer."
        )
    else:
        return None
    return RunProblem("truncated", text, remedy, _cut_answers(evidence))


def _costs_reward(evidence: Evidence) -> bool:
    """Return whether truncated answers get clearly lower rewards than complete answers.

    Return False without a comparison if the rewards in the last steps are close to the highest reward of the run. The
    comparison requires at least two truncated and two complete answers. If there are fewer, the function decides by the
    training reward instead: it returns False if the training reward rises, and True otherwise.
    """
    if evidence.at_highest:
        return False
    samples, late = evidence.samples, evidence.samples.late
    is_cut = np.isin(late, samples.flagged("truncated", late))
    cut, whole = (
        rewards[np.isfinite(rewards)] for rewards in (samples.rewards[late[is_cut]], samples.rewards[late[~is_cut]])
    )
    if len(cut) < 2 or len(whole) < 2:
        return not evidence.reward_rises
    error = math.sqrt(cut.var() / len(cut) + whole.var() / len(whole))
    return bool(whole.mean() - cut.mean() > CLEAR * error)


def _raise_limit(evidence: Evidence) -> str:
    """Return the remedy for truncated answers: a higher limit.

    Repetitive answers suggest that the model never stops. If most truncated answers are repetitive, the remedy also says what
    to do about such a model.
    """
    samples = evidence.samples
    texts = completions(samples, samples.spread(samples.flagged("truncated", samples.late)))
    endless = not texts or sum(distinct_share(text) < REPETITIVE for text in texts) > len(texts) / 2
    advice = f"Raise the limit: {evidence.advice.scaled('--max-new-tokens', 2)}."
    stop = (
        "If the model never stops, check its end-of-sequence token and chat template, or use SFT to teach the model to "
        "stop."
    )
    return f"{advice} {stop}" if endless else advice


def _limit(evidence: Evidence) -> str:
    return f"the limit of {short(evidence.advice.number('--max-new-tokens') or math.nan)} tokens"


def _cut_answers(evidence: Evidence) -> tuple[str, ...]:
    samples = evidence.samples
    return evidence.ids(samples.flagged("truncated", samples.late)[::-1])
