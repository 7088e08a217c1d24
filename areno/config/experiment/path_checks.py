"""Checks the files and folders of an experiment, without downloads and without importing user code."""

import json
from collections.abc import Iterator
from pathlib import Path

from areno.config.experiment.engine_sections import TeacherConfig, TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.run_sections import LOADER
from areno.config.experiment.setting_declaration import settings_of, walk
from areno.config.paths import ckpt_problem, dataset_problem, is_address, unwritable
from areno.config.splits import explicit_split, has_splits, row_sources, split_problem

DATASETS = ("train_dataset", "valid_dataset")
"""Sections of datasets."""


def path_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield the problems with model, data and output paths."""
    yield from _models(config)
    yield from data_problems(config)
    yield unwritable(Path(config.cluster.fileroot), "cluster.fileroot")


def _models(config: BaseExperimentConfig) -> Iterator[str]:
    seen = set()
    if isinstance(config, PPOConfig) and config.reward_section.path:
        yield ckpt_problem(config.reward_section.path, "reward.path")
    for path, _, value in walk(config):
        if isinstance(value, TrainEngineConfig | TeacherConfig) and value.path not in seen:
            seen.add(value.path)
            if isinstance(value, TeacherConfig) and is_address(value.path):
                continue
            yield ckpt_problem(value.path, f"{path}.path")
        if isinstance(value, TrainEngineConfig):
            yield _family(value, path)


def _family(engine: TrainEngineConfig, path: str) -> str:
    file = Path(engine.path).expanduser() / "config.json"
    if not engine.model_type or not file.is_file():
        return ""
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return ""  # reported by `ckpt_problem`
    return family_problem(engine, path, model_type)


def family_problem(engine: TrainEngineConfig, path: str, model_type: str | None) -> str:
    """Return a problem if ``engine.model_type`` differs from ``model_type``; otherwise "".

    Args:
        engine: configuration section of a model.
        path: path of this section in the configuration, such as ``actor``.
        model_type: model type in the checkpoint's ``config.json``.
    """
    if model_type == engine.model_type:
        return ""
    return (
        f"{path}.model_type is {engine.model_type!r}, but {engine.path} is a {model_type} model; correct or remove "
        f"{path}.model_type"
    )


def data_problems(config: BaseExperimentConfig, names: tuple[str, ...] = DATASETS) -> Iterator[str]:
    """Yield a problem for each unreadable dataset, and for held-out rows that are also training rows."""
    readable = True
    for name in names:
        section = getattr(config, name)
        if section is None or LOADER in section.dataset_kwargs:
            continue
        problem = dataset_problem(section.path, has_loader=False, option=f"{name}.path")
        problem = problem or split_problem(section.path, section.split, f"{name}.path") or _split(config, name)
        readable &= not problem
        yield problem
    train, valid = config.train_dataset, config.valid_dataset
    if not readable or valid is None or names != DATASETS or valid.split == train.split:
        return
    if held_out_is_trained(config):
        yield (
            f"valid_dataset (path {valid.path}, split {valid.split}) contains rows of train_dataset; use held-out rows. "
            f"To evaluate on training rows on purpose, set valid_dataset.split={train.split}, as in train_dataset"
        )


def _split(config: BaseExperimentConfig, name: str) -> str:
    """Return a problem if the dataset section ``name`` sets ``split`` without effect; otherwise "".

    ``split`` has no effect if the dataset has no splits, or if the section's ``path`` selects a split, as in
    ``gsm8k:main:test``.
    """
    section, explicit = getattr(config, name), explicit_split(getattr(config, name).path)
    harmless = (settings_of(type(section))["split"].default, config.train_dataset.split, explicit)
    if has_splits(section.path) or section.split in harmless:
        return ""
    why = f"the path includes the split {explicit}" if explicit else f"{section.path} has no splits"
    return f"{name}.split {section.split} has no effect: {why}; remove the setting"


def held_out_is_trained(config: BaseExperimentConfig) -> bool:
    """Whether ``valid_dataset`` and ``train_dataset`` share rows."""
    if config.valid_dataset is None:
        return False
    train, valid = (
        frozenset({f"{section.path} {section.split} {section.dataset_kwargs}"})
        if LOADER in section.dataset_kwargs
        else row_sources(section.path, section.split)
        for section in (config.train_dataset, config.valid_dataset)
    )
    return bool(train & valid)
