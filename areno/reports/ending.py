"""Why a run ended, in words."""

import re
import time
from dataclasses import dataclass

import numpy as np

from areno.errors import MEMORY_HINT, OUT_OF_MEMORY
from areno.reports.advice import OptionAdvice
from areno.reports.run_data import RunData
from areno.storage.run_status import FAILED, FINISHED, KILLED, RUNNING, STOPPED

_PLANNED = re.compile(r"step \d+/(\d+) ")
_ERROR_CHARS = 4000
_SIGNALS = {
    "SIGINT": "by Ctrl-C (SIGINT)",
    "SIGTERM": "by SIGTERM, which a scheduler, a container or `kill` sends",
    "SIGHUP": "by SIGHUP, because its terminal was closed",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended.

    Attributes:
        state: that of the status file; ``""`` if it is unknown.
        text: why it ended.
        remedy: what to do, if it did not finish.
    """

    state: str
    text: str
    remedy: str = ""


def steps_done(run: RunData) -> int:
    """Completed steps, by the metrics."""
    keys = ("loss", "reward", "step_seconds", "grad_norm")
    return max((series.steps[-1] + 1 for key in keys if (series := run.series(key)).steps), default=0)


def ending_of(run: RunData, advice: OptionAdvice) -> Ending:
    """Why a run ended, or that it has not."""
    status, done = run.status, steps_done(run)
    state = status.get("state", FINISHED if run.summary else "")
    at = f"after {_steps(done)}{_of_planned(run)}" if done else "before the end of its first step"
    if state == FINISHED:
        return Ending(state, f"It finished: {_reached(run, advice, done)}.")
    if state == RUNNING:
        return Ending(state, f"It has not ended: it is running, {at}{_since_last_step(run)}.")
    again = _again(run, done)
    if state == STOPPED:
        signal = str(status.get("signal"))
        return Ending(state, f"It was stopped {_SIGNALS.get(signal, f'by {signal}')} {at}.", again)
    if state == FAILED:
        error = str(status.get("error"))[:_ERROR_CHARS]
        hint = (
            MEMORY_HINT + ". " if OUT_OF_MEMORY.search(error) else "Fix what the error names; the log has the details. "
        )
        return Ending(state, f"It failed {at}: {error}", hint + again)
    if state == KILLED:
        return Ending(
            state,
            f"Its process was killed {at} and could not record why, as happens when memory runs out (the kernel's "
            "out-of-memory killer), with kill -9, or when the machine goes down.",
            f"See the kernel's log (dmesg) for `Out of memory`. If memory ran out: {MEMORY_HINT}. {again}",
        )
    return Ending("", f"Unknown: the run recorded no status; its metrics end {at}.")


def _steps(count: int) -> str:
    return f"{count:,} step" + ("" if count == 1 else "s")


def _of_planned(run: RunData) -> str:
    """``" of N"`` if the log shows the number of planned steps."""
    planned = [match[1] for line in run.log_tail() if (match := _PLANNED.search(line))]
    return f" of {int(planned[-1]):,}" if planned else ""


def _since_last_step(run: RunData) -> str:
    times = run.metrics.times.values
    age = time.time() - times[-1] if times else 0.0
    usual = float(np.median(np.diff(times[-50:]))) if len(times) > 2 else age
    return (
        f"; its last record is {age / 60:.0f} minutes old, unlike the {usual:.0f} s between earlier ones"
        if age > max(60, 20 * usual)
        else ""
    )


def _again(run: RunData, done: int) -> str:
    """How to continue."""
    recover = run.config.get("recover")
    if run.is_experiment and isinstance(recover, dict) and recover.get("mode") == "disabled":
        return "Start it again, with recover.mode=auto to make it resumable."
    if not done:
        return "Then start it again."
    return f"Continue it from its last checkpoint: areno {'run' if run.is_experiment else 'train'} --resume {run.path}"


def _reached(run: RunData, advice: OptionAdvice, done: int) -> str:
    """Which limit of the run was reached."""
    patience, limit = advice.number("--early-stop-patience"), advice.number("--max-steps")
    if patience and (waited := _evaluations_since_best(run)) >= patience:
        setting = advice.assign("--early-stop-patience", int(patience))
        return (
            f"early stop after {_steps(done)}, because {waited} evaluations in a row were not the best one ({setting})"
        )
    if limit and done >= limit:
        return f"all {_steps(done)} of {advice.assign('--max-steps', int(limit))} are done"
    epochs, most = (
        advice.number("--epochs"),
        run.config.get("total_train_n_seqs" if run.is_experiment else "max_sequences"),
    )
    if most and (run.summary.get("sequences", 0) >= most or run.summary.get("epochs", epochs) != epochs):
        return f"{most:,} sequences are trained on, in {_steps(done)}"
    return f"{_steps(done)}, {epochs:.0f} epoch{'' if epochs == 1 else 's'} of the data" if epochs else _steps(done)


def _evaluations_since_best(run: RunData) -> int:
    for key, sign in (("eval_reward", 1), ("eval_accuracy", 1), ("eval_loss", -1)):
        values = sign * run.series(key).arrays()[1]
        if len(values):
            return len(values) - 1 - int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
    return 0
