"""The paths that ``areno train`` and ``areno run`` write, and functions that find the checkpoints and models of a run.

The paths in the left column are those of ``areno train``. The paths in the right column are those of ``areno run``:

    runs/<name>/                                   {fileroot}/logs/{user}/{experiment}/{trial}/
      config.yaml  metrics.jsonl  samples.jsonl      the same
      log.txt                                        main.log
      checkpoints/step_000100/                       checkpoints/recover/step_000100/
      checkpoints/best/                              checkpoints/recover/best/
      checkpoints/models/step_000100/                checkpoints/default/epoch0epochstep99globalstep99/

The functions read ``config.yaml``, because settings may place checkpoints in other folders.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areno.errors import UsageError
from areno.storage.checkpoint_folder import CheckpointFolder

CONFIG = "config.yaml"
ACTOR_MODELS = "default"
"""Name of the folder in which ``areno run`` saves the policy's models."""


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Names of the files and folders that a run of ``areno train`` or ``areno run`` writes."""

    log: str  # log file, below the run directory
    checkpoints: str  # checkpoints to resume from, below the checkpoint root
    models: str  # models of a role, below the checkpoint root
    model: str  # name of the model after a step; it ends in the step number
    first: int  # number that ``model`` gives to the first step


OPTIONS = RunLayout("log.txt", "", "models", "step_{steps:06d}", 1)
"""Paths of ``areno train``."""
EXPERIMENT = RunLayout("main.log", "recover", "{role}", "epoch{epoch}epochstep{epoch_step}globalstep{global_step}", 0)
"""Paths of ``areno run``."""


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory. False if this user has no permission to read the folder."""
    return os.path.isfile(path / CONFIG)


def is_experiment(run: Path, option: str) -> bool:
    """Whether ``areno run`` wrote the run directory ``run``.

    Raises UsageError if ``config.yaml`` is unreadable. The message starts with ``option``.
    """
    return "experiment_name" in _config(run, option)


def checkpoints_of(run: Path, option: str) -> Path:
    """Return the folder of the checkpoints from which a run resumes.

    Raises UsageError if ``config.yaml`` is unreadable. The message starts with ``option``.
    """
    config = _config(run, option)
    if "experiment_name" in config:
        return _root(run, config, "recover") / EXPERIMENT.checkpoints
    return Path(config.get("save_path") or run / "checkpoints")


def newest_model(source: str | Path, option: str) -> str:
    """Return the newest model in a run directory or a folder of checkpoints. Any other ``source`` is returned unchanged.

    The newest checkpoint, the best checkpoint and the newest saved model are compared by their numbers of completed steps.

    Raises:
        UsageError: a run has no checkpoint, or its configuration is unreadable. The message starts with ``option``.
        CheckpointError: the best checkpoint cannot be read.
    """
    path = Path(source).expanduser()
    if not is_run(path):
        roots = [(layout, path / layout.checkpoints, path) for layout in (OPTIONS, EXPERIMENT)]
    else:
        roots = [_roots(path, option)]
    models = [model for root in roots for model in _newest(*root)]
    if models:
        return str(max(models)[1])
    if is_run(path):
        raise UsageError(f"{option} {source} is a run without a checkpoint; specify a model folder or another run")
    return str(source)


@dataclass(frozen=True, slots=True)
class SavedModels:
    """The saved checkpoints and models of a run. Each is represented by the number of steps completed before the save."""

    checkpoints: list[int]
    best: int | None  # completed steps of the best checkpoint; None if there is no best checkpoint
    models: list[int]  # completed steps of the models without training state


def saved_models(run: Path, option: str) -> SavedModels:
    """Return the steps after which a run saved its checkpoints and models.

    Raises UsageError, whose message starts with ``option``, if the configuration is unreadable. Raises CheckpointError if the
    best checkpoint is unreadable.
    """
    layout, folder, root = _roots(run, option)
    checkpoints = CheckpointFolder(folder)
    return SavedModels(checkpoints.steps(), checkpoints.best_step(), [step for step, _ in _models(layout, root)])


def _roots(run: Path, option: str) -> tuple[RunLayout, Path, Path]:
    """Return the layout, the checkpoint folder and the model folder of a run."""
    config, checkpoints = _config(run, option), checkpoints_of(run, option)
    if "experiment_name" in config:
        return EXPERIMENT, checkpoints, _root(run, config, "saver")
    return OPTIONS, checkpoints, checkpoints


def _newest(layout: RunLayout, checkpoints: Path, root: Path) -> list[tuple[int, Path]]:
    """Return (completed steps, path) of the newest checkpoint, the best checkpoint and the newest model, if they exist."""
    saved = CheckpointFolder(checkpoints)
    newest = [(step, saved.path(step)) for step in saved.steps()[-1:]]
    if (best := saved.best_step()) is not None:
        newest.append((best, saved.best))
    return [*newest, *_models(layout, root)[-1:]]


def _models(layout: RunLayout, root: Path) -> list[tuple[int, Path]]:
    """Return (completed steps, path) of each saved policy without training state, in ascending order of the steps."""
    folder = root / layout.models.format(role=ACTOR_MODELS)
    name = re.compile(re.sub(r"\{.*?\}", r"(\\d+)", layout.model))
    matches = ((name.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[match.re.groups]) + 1 - layout.first, path) for match, path in matches if match)


def _config(run: Path, option: str) -> Mapping[str, Any]:
    file = run / CONFIG
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{option} {file} cannot be read: {error}; specify the directory of a run") from error
    return config if isinstance(config, dict) else {}


def _root(run: Path, config: Mapping[str, Any], section: str) -> Path:
    """Return the folder below which a section of ``config.yaml``, such as ``saver``, saves its files.

    If the section sets its own ``fileroot``, this is a subfolder of ``fileroot``. Otherwise, it is the run's ``checkpoints``.
    """
    fileroot = (config.get(section) or {}).get("fileroot") or ""
    if fileroot in ("", (config.get("cluster") or {}).get("fileroot")):
        return run / "checkpoints"
    return Path(fileroot).expanduser().joinpath("checkpoints", *run.resolve().parts[-3:])
