"""Describes why a run ended."""

import math
import re
import time
from dataclasses import dataclass

import numpy as np

from areno.errors import MEMORY_HINT, OUT_OF_MEMORY
from areno.reports.advice import OptionAdvice
from areno.reports.checkpoints import resumable_step, saved_model
from areno.reports.run_data import RunData
from areno.storage.run_status import FAILED, FINISHED, KILLED, RUNNING, STOPPED

_PLANNED = re.compile(r"(Epoch \d+/(?P<epochs>\d+) )?step \d+/(?P<steps>\d+) ")
_ERROR_CHARS = 4000
_SIGNALS = {
    "SIGINT": "by Ctrl-C (SIGINT)",
    "SIGTERM": "by SIGTERM (from a scheduler, a container or `kill`)",
    "SIGHUP": "by SIGHUP (its terminal was closed)",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended.

    Attributes:
        state: a state of :mod:`areno.storage.run_status`; ``""`` if unknown.
        text: why the run ended.
        remedy: what to do if the run did not finish.
    """

    state: str
    text: str
    remedy: str = ""


def steps_done(run: RunData) -> int:
    """Return the number of completed steps, according to the metrics."""
    keys = ("loss", "reward", "step_seconds", "grad_norm")
    return max((series.steps[-1] + 1 for key in keys if (series := run.series(key)).steps), default=0)


def ending_of(run: RunData, advice: OptionAdvice) -> Ending:
    """Describe why a run ended, or that the run is still in progress."""
    status, done = run.status, steps_done(run)
    state = status.get("state", FINISHED if run.summary else "")
    at = f"after {_steps(done)}{_of_planned(run, advice)}" if done else "before the end of its first step"
    if state == FINISHED:
        return Ending(state, f"The run finished: {_reached(run, advice, done)}.")
    if state == RUNNING:
        return Ending(state, f"The run is still running, {at}{_since_last_step(run)}.")
    again = _again(run, advice, done)
    if state == STOPPED:
        signal = str(status.get("signal"))
        return Ending(state, f"The run was stopped {_SIGNALS.get(signal, f'by {signal}')} {at}.", again)
    if state == FAILED:
        error = str(status.get("error"))[:_ERROR_CHARS]
        hint = (
            MEMORY_HINT + ". "
            if OUT_OF_MEMORY.search(error)
            else "First fix the cause of the error (the log has the details); otherwise a resumed run fails again. "
        )
        return Ending(state, f"The run failed {at}: {error}", hint + again)
    if state == KILLED:
        less_memory = "actor.mb_spec.max_tokens_per_mb" if run.is_experiment else "--mini-bs"
        return Ending(
            state,
            f"The process of the run was killed {at} and could not record a reason. Possible reasons: a scheduler or `kill -9` "
            "killed the process, memory ran out, or the machine went down.",
            f"If the kernel's log (dmesg) says that memory ran out, lower {less_memory}. {again}",
        )
    return Ending("", f"The reason for the end is unknown: the run recorded no status, and its metrics end {at}.")


def _steps(count: int) -> str:
    return f"{count:,} step" + ("" if count == 1 else "s")


def _of_planned(run: RunData, advice: OptionAdvice) -> str:
    """Return a text such as ``" of 200 (--max-steps 200)"``: the number of planned steps, and the option that sets it.

    The number comes from the configuration or the log. Return ``""`` if neither has the number.
    """
    planned = [match for line in run.log_tail() if (match := _PLANNED.search(line))]
    # An experiment logs the steps of an epoch, `areno train` those of the run.
    steps = int(planned[-1]["steps"]) * int(planned[-1]["epochs"] or 1) if planned else math.inf
    limit, epochs = advice.number("--max-steps") or math.inf, advice.number("--epochs")
    if limit <= steps < math.inf or (limit < steps and not planned):
        return f" of {limit:,.0f} ({advice.assign('--max-steps', int(limit))})"
    if not planned:
        return ""
    return f" of {steps:,.0f}" + (f" ({advice.assign('--epochs', int(epochs))})" if epochs else "")


def _since_last_step(run: RunData) -> str:
    times = run.metrics.times.values
    age = time.time() - times[-1] if times else 0.0
    usual = float(np.median(np.diff(times[-50:]))) if len(times) > 2 else age
    return (
        f"; its last record is {age / 60:.0f} min old, although earlier records came every {usual:.0f} s"
        if age > max(60, 20 * usual)
        else ""
    )


def _again(run: RunData, advice: OptionAdvice, done: int) -> str:
    """Describe how to continue the run, or how to start the run again."""
    if not done:
        return "Start the run again."
    command = f"areno {'run' if run.is_experiment else 'train'} --resume {run.path}"
    if (step := resumable_step(run)) is not None:
        return f"Continue the run from its checkpoint of step {step:,}: {command}"
    model = saved_model(run)
    kept = f"The last saved model is {model}." if model else "No saved model was found."
    recover = run.config.get("recover")
    if run.is_experiment and isinstance(recover, dict) and recover.get("mode") == "disabled":
        return f"The run cannot be resumed, because recover.mode is disabled; start a new run with recover.mode=auto. {kept}"
    every = run.config.get("save_interval")
    option = "recover.freq_steps" if run.is_experiment else f"--save-interval{f' (now {every})' if every else ''}"
    again = (
        f"The run has no checkpoint to resume from. Start the run again; a lower {option} writes a checkpoint earlier."
    )
    return f"{again} {kept}" if model else again


def _reached(run: RunData, advice: OptionAdvice, done: int) -> str:
    """Describe which limit of the run was reached."""
    patience, limit = advice.number("--early-stop-patience"), advice.number("--max-steps")
    if patience and (waited := _evaluations_since_best(run)) >= patience:
        setting = advice.assign("--early-stop-patience", int(patience))
        return f"early stop after {_steps(done)}, because the last {waited} evaluations did not improve on the best ({setting})"
    if limit and done >= limit:
        return f"all {_steps(done)} of {advice.assign('--max-steps', int(limit))} are done"
    epochs, most = (
        advice.number("--epochs"),
        run.config.get("total_train_n_seqs" if run.is_experiment else "max_sequences"),
    )
    if most and (run.summary.get("sequences", 0) >= most or run.summary.get("epochs", epochs) != epochs):
        return f"the limit of {most:,} trained sequences was reached after {_steps(done)}"
    return f"{_steps(done)}, {epochs:.0f} epoch{'' if epochs == 1 else 's'} of the data" if epochs else _steps(done)


def _evaluations_since_best(run: RunData) -> int:
    for key, sign in (("eval_reward", 1), ("eval_accuracy", 1), ("eval_loss", -1)):
        values = sign * run.series(key).arrays()[1]
        if len(values):
            return len(values) - 1 - int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
    return 0
