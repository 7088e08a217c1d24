"""Converts a configuration to plain data and to YAML. Loading this YAML gives an equal configuration, but without secrets."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import yaml

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.secrets import without_secrets


class _Dumper(yaml.SafeDumper):
    """Writes text such as 1e5 in quotes. Without quotes, OmegaConf would read the text as a number."""


_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def conf_as_dict(config: Any) -> dict[str, Any]:
    """Return a configuration, or a section, as nested dicts and lists."""
    return dataclasses.asdict(config)


def config_text(config: BaseExperimentConfig) -> str:
    """Return the configuration as YAML without secrets, with settings in the order of their declaration."""
    return yaml.dump(public_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def public_dict(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return :func:`conf_as_dict` without secrets."""
    return dict(without_secrets(conf_as_dict(config)))


def save_config(config: BaseExperimentConfig, path: str | Path) -> Path:
    """Write the configuration to a file for `load_expr_config`, and return the file's path.

    A ``path`` that does not end in .yaml or .yml is a folder, and the file is its ``config.yaml``.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        path = path / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(config_text(config))
    path.chmod(0o600)  # in case the file existed before
    return path
