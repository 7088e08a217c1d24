"""Finds which saved models and checkpoints of a run still exist, for advice on how to continue the run."""

from contextlib import suppress
from pathlib import Path

from areno.errors import ArenoError
from areno.reports.advice import OptionAdvice
from areno.reports.run_data import RunData
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import SavedModels, checkpoints_of, newest_model, saved_models

_UNREADABLE = (ArenoError, OSError, LookupError, TypeError, ValueError, AttributeError)
"""Errors raised by a damaged or missing folder, or by settings of wrong types."""


def saved(run: RunData) -> SavedModels | None:
    """Return the models that the run has saved; None if its folders cannot be read."""
    with suppress(*_UNREADABLE):
        return saved_models(run.path, "areno report")
    return None


def resumable_step(run: RunData) -> int | None:
    """Return the number of completed steps in the newest checkpoint that can be resumed; None without such a checkpoint."""
    if (models := saved(run)) is None:
        return None
    best = [] if models.best is None else [models.best]
    return max([*models.checkpoints[-1:], *best], default=None)


def saved_model(run: RunData) -> str:
    """Return the path of the newest saved model, relative to the run directory if possible; ``""`` if there is no model."""
    with suppress(*_UNREADABLE):
        model = Path(newest_model(run.path, "areno report"))
        return "" if model == run.path else _shown(run, model)  # a folder without config.yaml may be returned unchanged
    return ""


def kept(run: RunData, advice: OptionAdvice, step: int) -> str:
    """Return a sentence on whether the model evaluated at ``step`` still exists."""
    if step == 0 and not run.is_experiment:
        return "The best model is the initial model."
    if step == 0 and advice.value("--eval-before-train"):  # an evaluation before training also has step 0
        return (
            "The best model is the initial model or the model after the first step (both evaluations count as step 0)."
        )
    model_folder = None
    with suppress(*_UNREADABLE):
        folder = CheckpointFolder(checkpoints_of(run.path, "areno report"))
        # An experiment counts the steps of its evaluations from 0.
        model_folder = folder.find(step + 1 if run.is_experiment else step)
    if model_folder is not None:
        return f"The model of step {step} is kept in {_shown(run, model_folder)}."
    off = "" if advice.value("--keep-best") else f" ({advice.text('--keep-best')} was off)"
    return f"The model of step {step} was not kept{off}."


def _shown(run: RunData, path: Path) -> str:
    return str(path.relative_to(run.path) if path.is_relative_to(run.path) else path)
