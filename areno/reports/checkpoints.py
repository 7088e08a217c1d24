"""Which models and states of a run are still there, to advise where to continue or what to use."""

from contextlib import suppress
from pathlib import Path

from areno.errors import ArenoError
from areno.reports.advice import OptionAdvice
from areno.reports.run_data import RunData
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import checkpoints_of, newest_model


def resumable_step(run: RunData) -> int | None:
    """Completed steps of the newest checkpoint that the run can be resumed from; None if there is none."""
    with suppress(ArenoError, OSError, LookupError, TypeError):
        folder = _folder(run)
        return max([*folder.steps()[-1:], *[step for step in [folder.best_step()] if step is not None]], default=None)
    return None


def saved_model(run: RunData) -> str:
    """The newest saved model, relative to the run directory where possible; ``""`` if there is none."""
    with suppress(ArenoError, OSError, LookupError, TypeError):
        return _shown(run, Path(newest_model(run.path, "areno report")))
    return ""


def kept(run: RunData, advice: OptionAdvice, step: int) -> str:
    """Whether the model that an evaluation in ``step`` measured is still there, as a sentence."""
    if step == 0:
        return "The best model is the initial one."
    model_folder = None
    with suppress(ArenoError, OSError, LookupError, TypeError):
        folder = _folder(run)  # an experiment counts the steps of its evaluations from 0
        model_folder = folder.find(step + 1 if run.is_experiment else step)
    if model_folder is not None:
        return f"The model of step {step} is kept in {_shown(run, model_folder)}."
    off = "" if advice.value("--keep-best") else f" ({advice.text('--keep-best')} was off)"
    return f"The model of step {step} was not kept{off}."


def _folder(run: RunData) -> CheckpointFolder:
    return CheckpointFolder(checkpoints_of(run.path, "areno report"))


def _shown(run: RunData, path: Path) -> str:
    return str(path.relative_to(run.path) if path.is_relative_to(run.path) else path)
