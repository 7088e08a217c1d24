"""Gives a verdict on a run in plain words: whether the run learned, why it ended, what is wrong, and what to change.

Each problem also names samples that show the problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from areno.reports.ending import Ending, ending_of
from areno.reports.evidence import Evidence, RunProblem
from areno.reports.hacking import hacking_problems
from areno.reports.learning import HEADLINES, Learned, State, learned
from areno.reports.overfitting import contaminated
from areno.reports.problems import metric_problems
from areno.reports.run_data import RunData
from areno.reports.svg import short

_CAUSES = (
    *("non_finite", "exploding", "reward_errors", "episodes_failed", "entropy_explosion", "collapsed", "cut_off"),
    *("equal_rewards", "zero_gradient", "length_collapse"),
)
"""Keys of the problems that the verdict lists first.

Next, the verdict lists signs that the policy exploits the reward. All other problems follow.
"""
_EXPLOITED = ("opposed_parts", "repetitive", "identical")
_BY_EXPLOITATION = ("solved", "neglected", "tied_groups", "truncated", "length_explosion", "entropy_collapse")
_EXPLAINED = {
    "equal_rewards": ("zero_gradient", "tied_groups"),  # zero_gradient only if ties are unknown
    "cut_off": ("zero_gradient", "tied_groups", "truncated"),
    "collapsed": ("zero_gradient", "tied_groups", "truncated", "entropy_collapse", "exploding"),
    "solved": ("tied_groups", "zero_gradient"),
    "neglected": ("zero_gradient",),
    "length_collapse": ("solved", "tied_groups"),
    "memorized": ("against_evaluation", "tied_groups", "solved"),
    **dict.fromkeys(_EXPLOITED, _BY_EXPLOITATION),
}
"""Maps a problem to its possible effects. If the verdict lists the problem, it does not list these effects."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers about a run: whether it learned, why it ended, and its problems. ``problems`` lists causes before effects."""

    learned: Learned
    ending: Ending
    problems: tuple[RunProblem, ...]

    def lines(self) -> list[str]:
        """Return the verdict as lines of text, each with a question and its answer."""
        lines = [
            f"Did the model learn? {HEADLINES[self.learned.state]} {self.learned.text}",
            f"Why did the run end? {self.ending.text}",
        ]
        lines += [f"What to do next? {self.ending.remedy}"] if self.ending.remedy else []
        for problem in self.problems:
            shown = f" See samples {', '.join(problem.samples)}." if problem.samples else ""
            lines += [f"What is wrong? {problem.text}{shown}", f"What to change? {problem.remedy}"]
        return lines if self.problems else [*lines, f"What is wrong? {self.nothing_wrong}"]

    @property
    def nothing_wrong(self) -> str:
        """The answer to the question "What is wrong?" if no problem was found."""
        return f"The metrics and samples show {'no other' if self.ending.remedy else 'no'} problem."


def verdict_of(run: RunData, evidence: Evidence | None = None) -> Verdict:
    """Return the verdict on a run, from its metrics, status, warnings and samples."""
    evidence = evidence or Evidence(run)
    result = learned(evidence.progress)
    by_metrics = metric_problems(evidence)
    problems = [problem for problem in by_metrics if problem.key in _CAUSES]
    problems += hacking_problems(evidence)
    problems += [problem for problem in by_metrics if problem.key not in _CAUSES]
    keys = {problem.key for problem in problems}
    explained = {name for key in keys for name in _EXPLAINED.get(key, ())}
    problems = [problem for problem in problems if problem.key not in explained]
    result = replace(result, state=_decided(result.state, {problem.key for problem in problems}))
    extra = (_unexplained(evidence, result, problems), contaminated(evidence))
    problems += [replace(each, remedy=evidence.advice.text(each.remedy)) for each in extra if each is not None]
    if any(problem.key == "solved" for problem in problems) and result.state == "no":
        result = replace(result, text=f"{result.text} The task was solved from the start.")
    return Verdict(result, ending_of(run, evidence.advice), tuple(problems))


def _decided(state: State, keys: set[str]) -> State:
    """Return the final answer to "Did the model learn?".

    The answer from the metrics, ``state``, is corrected if one of the detected problems (``keys``) contradicts it. For example,
    a rising reward suggests that the model learned, but the policy may only have exploited the reward function.
    """
    if state in ("yes", "partly") and not keys.isdisjoint(_EXPLOITED):
        return "exploited"
    if state in ("yes", "partly", "worse", "lost") and "memorized" in keys:
        return "memorized"
    return "partly" if state == "yes" and "neglected" in keys else state


def _unexplained(evidence: Evidence, result: Learned, problems: list[RunProblem]) -> RunProblem | None:
    """Return a problem if the model did not learn, learned only partly, or became worse.

    Return None for other results. Also return None if ``problems`` is not empty, because these problems explain the result.
    """
    if problems:
        return None
    if result.state in ("lost", "worse"):
        return _collapse(evidence)
    if result.state == "partly":
        return RunProblem(
            "not_on_held_out",
            "Held-out data does not confirm the improvement in training.",
            "Check that the held-out prompts pose the same task in the same form, and train on more and different data.",
        )
    return _no_progress(evidence) if result.state == "no" else None


def _collapse(evidence: Evidence) -> RunProblem | None:
    """Report that the metric by which the run is judged was better earlier in the run."""
    progress = evidence.progress
    got_worse = progress.lost(progress.held_out) or progress.down(progress.held_out)
    trend = progress.held_out if got_worse else progress.train
    if trend is None:
        return None
    value, step = progress.best(trend)
    return RunProblem(
        "collapse",
        f"The {progress.name} was best ({short(value)}) around step {step} and is now {short(trend.last)}. The "
        "recorded data does not show the cause of this decline.",
        f"Use a checkpoint from before the decline (--keep-best keeps the best checkpoint), and lower the learning rate with "
        f"{evidence.lower_rate(step, 0.3)}" + (f", or add {evidence.advice.kl}." if progress.by_reward else "."),
        evidence.spread(),
    )


def _no_progress(evidence: Evidence) -> RunProblem:
    """Report that the reward (or the loss, if there are no rewards) stayed within its noise."""
    entropy, advice = evidence.trend("entropy"), evidence.advice
    moved = entropy is not None and (entropy.rises or entropy.falls)
    what = "The policy changes, but not in the direction of the reward" if moved else "The model hardly changes"
    remedy = (
        f"Use more answers per step with {advice.scaled('--n-samples', 2)} and {advice.scaled('--batch-size', 2)}, and check "
        "that better answers get higher rewards."
        if moved
        else f"Raise the learning rate tenfold with {advice.scaled('--lr', 10)}, and train again. Repeat this until the "
        f"entropy or {'the reward changes' if evidence.progress.by_reward else 'the loss changes'}."
    )
    return RunProblem("no_progress", f"{what}: the {evidence.progress.name} stayed within its noise.", remedy)
