"""Where each front end keeps what a run writes, as a table, and the one reader of it.

    runs/<name>/                                   {fileroot}/logs/{user}/{experiment}/{trial}/
      config.yaml  metrics.jsonl  samples.jsonl      the same
      log.txt                                        main.log
      checkpoints/step_000100/                       checkpoints/recover/step_000100/
      checkpoints/best/                              checkpoints/recover/best/
      checkpoints/models/step_000100/                checkpoints/default/epoch0epochstep99globalstep99/

Special here: settings may put checkpoints elsewhere, so the reader follows what ``config.yaml`` says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areno.errors import UsageError
from areno.storage.checkpoints import CheckpointFolder

CONFIG = "config.yaml"
ACTOR_MODELS = "default"
"""Role whose models are those of the policy."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One front end's table of paths."""

    log: str  # of the run, below its directory
    checkpoints: str  # what the run resumes from, below the root of all that is saved
    models: str  # folder of a role's models, below the same root
    model: str  # name of the model after a step; it ends in the number of the step
    first: int  # that number for the first step


OPTIONS = Layout("log.txt", "", "models", "step_{steps:06d}", 1)
"""Of ``areno train``."""
EXPERIMENT = Layout("main.log", "recover", "{role}", "epoch{epoch}epochstep{epoch_step}globalstep{global_step}", 0)
"""Of ``areno run``."""


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory."""
    return (path / CONFIG).is_file()


def is_experiment(run: Path, option: str) -> bool:
    """Whether ``areno run`` wrote a run directory; ``option`` named it. Raises UsageError: its configuration is unreadable."""
    return "experiment_name" in _config(run, option)


def newest_model(place: str | Path, option: str) -> str:
    """The newest model in a run or a folder of checkpoints, or ``place`` itself. Raises UsageError, CheckpointError: none."""
    path = Path(place).expanduser()
    if not is_run(path):
        roots = [(layout, path / layout.checkpoints, path) for layout in (OPTIONS, EXPERIMENT)]
    elif is_experiment(path, option):
        config = _config(path, option)
        saved, recover = (_root(path, config, name) for name in ("saver", "recover"))
        roots = [(EXPERIMENT, recover / EXPERIMENT.checkpoints, saved)]
    else:
        root = Path(_config(path, option).get("save_path") or path / "checkpoints")
        roots = [(OPTIONS, root, root)]
    models = [model for root in roots for model in _newest(*root)]
    if models:
        return str(max(models)[1])
    if is_run(path):
        raise UsageError(f"{option} {place} is a run without a checkpoint; give a model folder or another run")
    return str(place)


def _newest(layout: Layout, checkpoints: Path, root: Path) -> list[tuple[int, Path]]:
    """The newest checkpoint and the newest model, where there are any, each with its completed steps."""
    kept = CheckpointFolder(checkpoints)
    newest = [(step, kept.path(step)) for step in kept.steps()[-1:]]
    if (best := kept.best_step()) is not None:
        newest.append((best, kept.best))
    folder = root / layout.models.format(role=ACTOR_MODELS)
    name = re.compile(re.sub(r"\{.*?\}", r"(\\d+)", layout.model))
    matches = ((name.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    models = [(int(match[match.re.groups]) + 1 - layout.first, path) for match, path in matches if match]
    return [*newest, *sorted(models)[-1:]]


def _config(run: Path, option: str) -> Mapping[str, Any]:
    file = run / CONFIG
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{option} {file} cannot be read: {error}; give the directory of a run") from error
    return config if isinstance(config, dict) else {}


def _root(run: Path, config: Mapping[str, Any], section: str) -> Path:
    """Where a section of an experiment saves: below its own ``fileroot``, or what the run directory links to."""
    own = (config.get(section) or {}).get("fileroot") or ""
    if own in ("", (config.get("cluster") or {}).get("fileroot")):
        return run / "checkpoints"
    return Path(own).expanduser().joinpath("checkpoints", *run.resolve().parts[-3:])
