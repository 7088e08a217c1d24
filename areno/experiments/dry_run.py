"""What an experiment would do: everything is checked and shown, no model is loaded, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.loader import settled
from areno.config.experiment.machine import resolve_for_machine
from areno.config.experiment.notices import notice
from areno.config.experiment.places import DATASETS
from areno.config.experiment.saving import config_text
from areno.experiments.checks import check_inputs
from areno.experiments.folders import ExperimentFolders
from areno.experiments.trainers.engines import this_machine
from areno.experiments.trainers.rows import RowSource, load_dataset

CheckRow = Callable[[Any, str, Sequence[Any]], None]


def dry_run(config: BaseExperimentConfig, check_first_row: CheckRow) -> str:
    """Check an experiment as a run does before it loads a model, and say what it would do.

    ``check_first_row`` is its trainer's; it gets the configuration, a section's name and its rows. Raises
    :class:`ArenoError` if the run could not begin.
    """
    check_inputs(config)
    config = settled(config)
    accepted = notice(config)
    resolved = resolve_for_machine(config, this_machine())
    folders = ExperimentFolders.of(config)
    lines = [
        config_text(config).rstrip(),
        *([accepted] if accepted else []),
        *resolved,
        *_data(config, check_first_row),
    ]
    lines += [f"run directory: {folders.logs}", f"models: {folders.checkpoints}"]
    return "\n".join([*lines, "dry run: nothing was started, and nothing was written"])


def _data(config: BaseExperimentConfig, check_first_row: CheckRow) -> list[str]:
    """How many rows and steps there are; the first row of each data set is looked at."""
    found = {name: load_dataset(section, name) for name in DATASETS if (section := getattr(config, name)) is not None}
    for name, rows in found.items():
        check_first_row(config, name, rows)
    section, rows = config.train_dataset, found["train_dataset"]
    source = RowSource(rows, section, config.seed)
    steps = config.total_train_epochs * source.steps_per_epoch
    steps = min(steps, config.total_train_steps or steps)
    told = f"steps: {steps}; an epoch has {source.steps_per_epoch}, before too long rows are left out"
    return [*(f"{name}: {len(rows)} rows" for name, rows in found.items()), told]
