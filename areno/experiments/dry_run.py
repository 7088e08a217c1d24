"""What an experiment would do: everything is checked and shown, no model is loaded, and nothing is written."""

from __future__ import annotations

from areno.api.row_checks import Needs, row_problem
from areno.config.experiment.experiments import BaseExperimentConfig, DPOConfig, RWConfig, SFTConfig
from areno.config.experiment.idle_checks import LOADER
from areno.config.experiment.loader import settled
from areno.config.experiment.machine import resolve_for_machine
from areno.config.experiment.notices import notice
from areno.config.experiment.places import DATASETS
from areno.config.experiment.saving import config_text
from areno.errors import DataError
from areno.experiments.checks import check_inputs
from areno.experiments.folders import ExperimentFolders
from areno.experiments.trainers.engines import this_machine
from areno.experiments.trainers.rows import load_dataset

_NEEDS: tuple[tuple[type[BaseExperimentConfig], Needs], ...] = (
    (SFTConfig, "response"),
    (RWConfig, "pair"),
    (DPOConfig, "pair"),
)


def dry_run(config: BaseExperimentConfig) -> str:
    """Check an experiment as a run does before it loads a model, and say what it would do.

    Args:
        config: of the experiment.

    Raises:
        ArenoError: the run could not begin.
    """
    check_inputs(config)
    config = settled(config)
    accepted = notice(config)
    resolved = resolve_for_machine(config, this_machine())
    folders = ExperimentFolders(config.cluster.fileroot, config.experiment_name, config.trial_name)
    lines = [config_text(config).rstrip(), *([accepted] if accepted else []), *resolved, *_data(config)]
    lines += [f"run directory: {folders.logs}", f"models: {folders.checkpoints}"]
    return "\n".join([*lines, "dry run: nothing was started, and nothing was written"])


def _data(config: BaseExperimentConfig) -> list[str]:
    """How many rows and steps there are; the first row of each data set is looked at."""
    needs = next((needs for kind, needs in _NEEDS if isinstance(config, kind)), None)
    counts = {}
    for name in DATASETS:
        if (section := getattr(config, name)) is None:
            continue
        rows = load_dataset(section, name)
        loader = f"{name}.dataset_kwargs.{LOADER}"
        if needs is not None and (problem := row_problem(needs, rows[0], f"{name} {section.path}", loader)):
            raise DataError(problem)
        counts[name] = len(rows)
    section = config.train_dataset
    size, count = section.batch_size, counts["train_dataset"]
    per_epoch = count // size if section.drop_last else -(-count // size)
    steps = per_epoch * config.total_train_epochs
    steps = min(steps, config.total_train_steps or steps)
    told = f"steps: {steps}; an epoch has {per_epoch}, before too long rows are left out"
    return [*(f"{name}: {number} rows" for name, number in counts.items()), told]
