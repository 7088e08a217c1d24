"""Finds the settings of a run that differ from their defaults."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.experiment.experiments import EXPERIMENTS
from areno.config.experiment.setting_declaration import Setting, paths_of
from areno.config.options import Option, options_of
from areno.config.parser import extra_options
from areno.config.yaml_io import flat
from areno.errors import ArenoError

_INDEX = re.compile(r"\.\d+\.")


def settings_of_run(config: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the settings that have a value: first those that differ from their defaults, then the others.

    Each list has names and values. A setting without a known default, such as a setting of a user's algorithm, counts as
    different. A setting does not count as different if its value equals the value of a setting from which it can inherit.
    """
    values = dict(flat(config, indexed=True))
    differs = _differs_in_experiment if "experiment_name" in config else _differs_in_options
    chosen = differs(config, values)
    parts: tuple[list[tuple[str, Any]], list[tuple[str, Any]]] = [], []
    for name, value in values.items():
        if value not in (None, "", [], {}):
            parts[name not in chosen].append((name, value))
    return parts


def _differs_in_options(config: Mapping[str, Any], values: Mapping[str, Any]) -> set[str]:
    entries: list[Option] = [*options_of(TrainOptions)]
    algorithm = str(config.get("algo", ""))
    if ".py" not in algorithm:  # a report does not run the file of an algorithm
        with suppress(ArenoError):
            entries += extra_options(get_algorithm(algorithm))
    defaults = {entry.name: _plain(entry.default) for entry in entries}
    return {name for name, value in values.items() if name not in defaults or value != defaults[name]}


def _differs_in_experiment(config: Mapping[str, Any], values: Mapping[str, Any]) -> set[str]:
    dataset = config.get("train_dataset")
    kind = EXPERIMENTS.get(str(dataset.get("type")) if isinstance(dataset, dict) else "")
    if kind is None:
        return {*values}
    declared, dependent = paths_of(kind), kind.dependent_defaults(values)
    return {
        name
        for name, value in values.items()
        if _is_chosen(name, value, declared.get(_INDEX.sub(".0.", name)), values, dependent)
    }


def _is_chosen(
    name: str, value: Any, entry: Setting | None, values: Mapping[str, Any], dependent: Mapping[str, Any]
) -> bool:
    if entry is None:
        return True
    inherited = entry.info.inherits
    return value != dependent.get(name, _plain(entry.default)) and not (inherited and value == values.get(inherited))


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
