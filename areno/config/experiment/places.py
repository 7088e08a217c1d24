"""Checks of files and folders that an experiment names; nothing is downloaded, and no hook is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from areno.config.experiment.engine_sections import TeacherConfig, TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.run_sections import TrainDatasetConfig
from areno.config.experiment.settings import walk
from areno.config.parser import Problems
from areno.config.paths import ckpt_problem, dataset_problem, unwritable


def check_places(config: BaseExperimentConfig) -> None:
    """Check that models and data are there, of the family that was named, and that the run can be written.

    Raises:
        UsageError: every problem, with its setting, value and remedy; numbered if there are several.
    """
    problems = Problems()
    for text in (*_models(config), *_data(config), unwritable(Path(config.cluster.fileroot), "cluster.fileroot")):
        problems.add(text)
    problems.raise_if_any()


def _models(config: BaseExperimentConfig) -> Iterator[str]:
    seen = set()
    for path, entry, value in walk(config):
        if entry.shape == "section" and isinstance(value, TrainEngineConfig | TeacherConfig) and value.path not in seen:
            seen.add(value.path)
            yield ckpt_problem(value.path, f"{path}.path")
        if entry.shape == "section" and isinstance(value, TrainEngineConfig):
            yield _family(value, path)


def _family(engine: TrainEngineConfig, path: str) -> str:
    file = Path(engine.path).expanduser() / "config.json"
    if not engine.model_type or not file.is_file():
        return ""
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError):
        return ""  # `ckpt_problem` says so
    if found == engine.model_type:
        return ""
    return f"{path}.model_type {engine.model_type!r}: {engine.path} is a {found} model; correct it, or leave it out"


def _data(config: BaseExperimentConfig) -> Iterator[str]:
    for path, entry, value in walk(config):
        if entry.shape == "section" and isinstance(value, TrainDatasetConfig):
            yield dataset_problem(value.path, has_loader=False, option=f"{path}.path")
