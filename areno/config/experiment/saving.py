"""Converts a configuration to plain data and to YAML that loads as the same configuration, without secrets.

API key settings are omitted. Other values that look like secrets by name or form, and all environment variables of workers,
become ``${oc.env:NAME}``: set these variables before loading the file.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import yaml

from areno.config.experiment.experiments import BaseExperimentConfig

SECRETS = ("admin_api_key", "provider_api_key", "wandb_api_key", "api_key")
"""Settings that are not written into files."""

_SECRET_WORDS = {"secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey"}
_SECRET_WORDS |= {"authorization", "bearer", "cookie"}
# Words before "key" that mark a secret; other keys, such as prompt_key, are names of columns.
_KEY_OWNERS = {"api", "access", "secret", "private", "admin", "auth", "account", "encryption", "signing"}
# Words before "token" that mark a vocabulary token, not a secret.
_TOKEN_OWNERS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "image", "special"}
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def conf_as_dict(config: Any) -> dict[str, Any]:
    """Return a configuration, or a section, as nested dicts and lists."""
    return dataclasses.asdict(config)


def config_text(config: BaseExperimentConfig) -> str:
    """Return the configuration as YAML, in order of declaration, without secrets."""
    return yaml.safe_dump(public_dict(config), sort_keys=False, allow_unicode=True)


def public_dict(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return :func:`conf_as_dict` without secrets."""
    return dict(_public(conf_as_dict(config)))


def save_config(config: BaseExperimentConfig, path: str | Path) -> Path:
    """Write the configuration to a file, or to ``config.yaml`` in a folder, for `load_expr_config`; returns the file."""
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        path = path / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(config_text(config))
    path.chmod(0o600)  # in case the file existed before
    return path


def _public(value: Any, name: str = "") -> Any:
    if name == "env_vars" and isinstance(value, dict):
        return {key: f"${{oc.env:{key}}}" for key in value}
    if isinstance(value, dict):
        return {key: _public(item, str(key)) for key, item in value.items() if key not in SECRETS}
    if isinstance(value, str) and value and (_is_secret(name) or _URL_WITH_PASSWORD.search(value)):
        return f"${{oc.env:{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}}}"
    return [_public(item) for item in value] if isinstance(value, list) else value


def _is_secret(name: str) -> bool:
    """Whether the name of a setting or variable marks a secret."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")
    owner = words[-2] if len(words) > 1 else ""
    return (
        not _SECRET_WORDS.isdisjoint(words)
        or (words[-1] == "token" and owner not in _TOKEN_OWNERS)
        or (words[-1] == "key" and (not owner or owner in _KEY_OWNERS or name.isupper()))
    )
