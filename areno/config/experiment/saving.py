"""Writes a configuration as plain data and as YAML that loads again to the same configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from areno.config.experiment.experiments import BaseExperimentConfig

SECRETS = ("admin_api_key", "provider_api_key", "wandb_api_key", "api_key")
"""Settings that are not written into files."""


def conf_as_dict(config: Any) -> dict[str, Any]:
    """Return a configuration, or a section, as nested dicts and lists."""
    return dataclasses.asdict(config)


def config_text(config: BaseExperimentConfig) -> str:
    """Return the configuration as YAML, in order of declaration, keys (secrets) left out."""
    return yaml.safe_dump(_public(conf_as_dict(config)), sort_keys=False, allow_unicode=True, default_flow_style=False)


def save_config(config: BaseExperimentConfig, path: str | Path) -> Path:
    """Write the configuration, which `load_expr_config` reads again.

    Args:
        config: a resolved configuration.
        path: the file, or a folder that gets a ``config.yaml``.

    Returns:
        The file that was written.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        path = path / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_text(config), encoding="utf-8")
    return path


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if key not in SECRETS}
    return [_public(item) for item in value] if isinstance(value, list) else value
