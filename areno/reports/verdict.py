"""Answers about a run in plain words: did it learn, why did it end, what is wrong, what to change, which samples show it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from areno.reports.ending import Ending, ending_of
from areno.reports.hacking import hacking_problems
from areno.reports.learning import HEADLINES, Learned, learned
from areno.reports.problems import Evidence, RunProblem, metric_problems
from areno.reports.run_data import RunData
from areno.reports.svg import short

_CAUSES = (
    *("non_finite", "exploding", "reward_errors", "episodes_failed", "entropy_explosion", "collapsed", "equal_rewards"),
    *("zero_gradient", "length_collapse"),
)
"""Problems that are listed first; then come signs of exploitation, which may be why answers get longer or all alike."""
_EXPLAINED = {
    "equal_rewards": ("zero_gradient", "tied_groups"),  # without the metric of ties and without samples, both may hold
    "collapsed": ("zero_gradient", "tied_groups", "truncated"),
    "solved": ("tied_groups",),
    "length_collapse": ("solved", "tied_groups"),
    "opposed_parts": ("solved", "tied_groups"),
    "repetitive": ("solved", "tied_groups", "truncated"),
    "identical": ("solved", "tied_groups"),
}
"""Problems that follow from another one, and so are not listed beside it."""
_EXPLOITED = ("opposed_parts", "repetitive", "identical")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers about a run; ``problems`` are listed causes first."""

    learned: Learned
    ending: Ending
    problems: tuple[RunProblem, ...]

    def lines(self) -> list[str]:
        """The answers as text."""
        lines = [
            f"Did it learn? {HEADLINES[self.learned.state]} {self.learned.text}",
            f"Why did it end? {self.ending.text}",
        ]
        lines += [f"What to do then? {self.ending.remedy}"] if self.ending.remedy else []
        for problem in self.problems:
            shown = f" See samples {', '.join(problem.samples)}." if problem.samples else ""
            lines += [f"What is wrong? {problem.text}{shown}", f"What to change? {problem.remedy}"]
        return lines if self.problems else [*lines, f"What is wrong? {self.nothing_wrong}"]

    @property
    def nothing_wrong(self) -> str:
        """What to answer without a problem."""
        return f"Nothing {'else ' if self.ending.remedy else ''}that the metrics or the samples show."


def verdict_of(run: RunData, evidence: Evidence | None = None) -> Verdict:
    """The verdict on a run, from its metrics, status, warnings and samples."""
    evidence = evidence or Evidence(run)
    result = learned(evidence.progress)
    by_metrics = metric_problems(evidence)
    problems = [problem for problem in by_metrics if problem.key in _CAUSES]
    text = evidence.advice.text
    problems += [
        replace(problem, text=text(problem.text), remedy=text(problem.remedy)) for problem in hacking_problems(evidence)
    ]
    problems += [problem for problem in by_metrics if problem.key not in _CAUSES]
    keys = {problem.key for problem in problems}
    explained = {name for key in keys for name in _EXPLAINED.get(key, ())}
    problems = [problem for problem in problems if problem.key not in explained]
    if result.state in ("yes", "partly") and not keys.isdisjoint(_EXPLOITED):
        result = replace(result, state="exploited")
    if extra := _unexplained(evidence, result, problems):
        problems.append(replace(extra, remedy=text(extra.remedy)))
    if any(problem.key == "solved" for problem in problems) and result.state == "no":
        result = replace(result, text=f"{result.text} It was solved from the start.")
    return Verdict(result, ending_of(run, evidence.advice), tuple(problems))


def _unexplained(evidence: Evidence, result: Learned, problems: list[RunProblem]) -> RunProblem | None:
    """A result that no other problem explains."""
    advice, progress = evidence.advice, evidence.progress
    late = evidence.samples.late
    if result.state in ("lost", "worse") and not problems:
        trend = (
            progress.held_out
            if progress.lost(progress.held_out) or progress.down(progress.held_out)
            else progress.train
        )
        if trend is None:
            return None
        value, step = progress.best(trend)
        return RunProblem(
            "collapse",
            f"The {progress.name} was best with {short(value)} around step {step} and is now {short(trend.last)}; nothing "
            "else that is recorded explains it.",
            f"Take the checkpoint before it got worse (--keep-best keeps the best one), and lower the learning rate, "
            f"{advice.scaled('--lr', 0.3)}" + (f", or add {advice.kl}." if progress.by_reward else "."),
            evidence.ids(evidence.samples.spread(late, 3)),
        )
    if result.state != "no" or problems:
        return None
    entropy = evidence.trend("entropy")
    moved = entropy is not None and (entropy.rises or entropy.falls)
    what = "The policy changes, but not in the direction of the reward" if moved else "The model hardly changes"
    remedy = (
        f"Average over more answers, {advice.scaled('--n-samples', 2)} and {advice.scaled('--batch-size', 2)}, and check that "
        "better answers get higher rewards."
        if moved
        else f"Raise the learning rate, {advice.scaled('--lr', 10)}, until entropy or reward move, or train for more steps."
    )
    return RunProblem("no_progress", f"{what}: the {progress.name} stayed within its noise.", remedy)
