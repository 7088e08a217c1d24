"""Detects signs that a model memorized its training data: metrics improve in training, but not on held-out data."""

from __future__ import annotations

import math

from areno.reports.checkpoints import kept
from areno.reports.evidence import SHOWN, Evidence, RunProblem
from areno.reports.learning import confirmed
from areno.reports.svg import short
from areno.reports.trends import trend_of

RISE = 1.02
"""The held-out loss has risen if it exceeds this multiple of its minimum. The margin of 2% is ten times ``LOSS_NOISE``."""
LOST = 0.2
"""A model has memorized its data if (rise of the held-out loss) / (previous fall of the held-out loss) exceeds this number.

The fall is the first held-out loss minus the minimum. The rise is the last held-out loss minus the minimum.
"""
OVERLAP = 0.1
"""The overlap is reported if at least this fraction of the recorded held-out prompts are training prompts."""
PASSES = 3.0
"""Memorized prompts are reported only if a policy was trained on each prompt at least this number of times on average."""


def overfitted(evidence: Evidence) -> RunProblem | None:
    """Detect that the held-out loss rises while the training loss falls."""
    train, held_out = evidence.trend("loss"), trend_of(evidence.run.series("eval_loss"), noise=0.0, width=1)
    if evidence.progress.by_reward or train is None or held_out is None or train.change >= 0:
        return None
    if not held_out.last > RISE * held_out.low > 0:
        return None
    lost = held_out.last - held_out.low > LOST * (held_out.first - held_out.low)
    return RunProblem(
        "memorized" if lost else "overfitted",
        f"The held-out loss was lowest ({short(held_out.low)}) at step {held_out.low_step} and rose to "
        f"{short(held_out.last)} while the training loss fell to {short(train.last)}: the model "
        f"{'memorizes' if lost else 'begins to memorize'} its data. {kept(evidence.run, evidence.advice, held_out.low_step)}",
        "Train on more and different data, or for fewer epochs (--epochs, now "
        f"{short(evidence.advice.number('--epochs') or math.nan)}){_stopping(evidence)}.",
    )


def memorized(evidence: Evidence) -> RunProblem | None:
    """Detect that the training reward rises on repeated prompts, but held-out prompts do not confirm the rise."""
    progress = evidence.progress
    train, held_out = progress.train, progress.held_out
    if not progress.by_reward or train is None or held_out is None or not evidence.reward_rises:
        return None
    if confirmed(progress) or (passes := _passes(evidence)) < PASSES:
        return None
    fell = "fell" if progress.down(held_out) else "did not rise"
    _, step = progress.best(held_out)
    return RunProblem(
        "memorized",
        f"The training reward rose, but the held-out reward {fell}: the policy memorized the answers to its training "
        f"prompts. {_repeated(evidence, passes)} {kept(evidence.run, evidence.advice, step)}",
        f"Train on more and different prompts, with fewer passes over the prompts{_stopping(evidence) if step else ''}.",
    )


def contaminated(evidence: Evidence) -> RunProblem | None:
    """Detect that recorded held-out prompts are among the recorded training prompts."""
    prompts = {str(record.get("prompt")) for record in evidence.run.eval_samples}
    trained = sum(map(evidence.samples.includes_prompt, prompts))
    if not prompts or trained < OVERLAP * len(prompts) or not trained:
        return None
    return RunProblem(
        "contaminated",
        f"{trained} of {len(prompts)} recorded held-out prompts are training prompts too, so the evaluation does not show "
        "what the model does with new prompts.",
        "Remove these prompts from the training data, or evaluate on other prompts (--eval-dataset-path).",
    )


def _stopping(evidence: Evidence) -> str:
    options = {"--keep-best": "--keep-best", "--early-stop-patience": "--early-stop-patience 3"}
    missing = [text for option, text in options.items() if not evidence.advice.value(option)]
    return f", with {' and '.join(missing)}" if missing else ""


def _passes(evidence: Evidence) -> float:
    """Return how often the policy was trained on each prompt, on average.

    The result is a lower bound, because a run may not record all its samples.
    """
    seen, different = evidence.samples.prompts
    epochs = evidence.run.summary.get("epochs")
    return max(seen / max(different, 1), float(epochs) if isinstance(epochs, int | float) else 0.0)


def _repeated(evidence: Evidence, passes: float) -> str:
    seen, different = evidence.samples.prompts
    if different and seen / different >= PASSES:
        return (
            f"Only {different:,} of {seen:,} recorded prompts are distinct. The average number of times that the policy saw a "
            f"prompt is at least {passes:,.0f}."
        )
    return f"The policy saw each prompt {passes:,.0f} times."


def against_evaluation(evidence: Evidence) -> RunProblem | None:
    """Detect that the training reward rises while the evaluation reward falls.

    The evaluation reward falls if its last value is clearly below its best value, or if the values in the second half of the
    evaluations are clearly below the first value.
    """
    train, held_out = evidence.progress.train, evidence.progress.held_out
    if not evidence.progress.by_reward or train is None or held_out is None or not evidence.reward_rises:
        return None
    if not (held_out.clear(held_out.peak - held_out.last) or evidence.progress.down(held_out)):
        return None
    return RunProblem(
        "against_evaluation",
        f"The training reward rose from {train}, but the evaluation reward fell from {short(held_out.peak)} at step "
        f"{held_out.peak_step} to {short(held_out.last)}: the training and evaluation rewards favor different behavior, or the "
        f"policy has specialized in its training prompts. {kept(evidence.run, evidence.advice, held_out.peak_step)}",
        "Look for a reward loophole in the best-rewarded samples, and close it. If there is no loophole, stop at the "
        f"best evaluation (--keep-best, --early-stop-patience 3) and add {evidence.advice.kl}.",
        evidence.ids(evidence.samples.extremes(SHOWN, highest=True, among=evidence.samples.late)),
    )
