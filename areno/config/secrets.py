"""Removes secrets from settings before they are logged or written to files.

Settings for API keys are omitted. Other values that look like secrets, by their name or their format, are replaced by
``${oc.env:NAME}``. Environment variables of workers are always replaced. When a file with a replaced value is loaded, the
environment variable NAME must be set.
"""

import re
from typing import Any

SECRETS = ("admin_api_key", "provider_api_key", "wandb_api_key", "api_key")
"""Settings that are never written to files."""

_SECRET_WORDS = {"secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey"}
_SECRET_WORDS |= {"authorization", "bearer", "cookie"}
# Words before "key" that mark a secret; other keys, such as prompt_key, are names of columns.
_KEY_OWNERS = {"api", "access", "secret", "private", "admin", "auth", "account", "encryption", "signing"}
# Words before "token" that mark a token of a vocabulary.
_TOKEN_OWNERS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "image", "special"}
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def without_secrets(value: Any, name: str = "") -> Any:
    """Return ``value`` without secrets, which are omitted or replaced by ``${oc.env:NAME}``.

    ``value`` is the value of the setting ``name``, or a dict that maps names of settings to values.
    """
    if name == "env_vars" and isinstance(value, dict):
        return {key: f"${{oc.env:{key}}}" for key in value}
    if isinstance(value, dict):
        return {key: without_secrets(item, str(key)) for key, item in value.items() if key not in SECRETS}
    if isinstance(value, str) and value and (_is_secret(name) or _URL_WITH_PASSWORD.search(value)):
        return f"${{oc.env:{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}}}"
    return [without_secrets(item, name) for item in value] if isinstance(value, list | tuple) else value


def _is_secret(name: str) -> bool:
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")
    owner = words[-2] if len(words) > 1 else ""
    return (
        not _SECRET_WORDS.isdisjoint(words)
        or (words[-1] == "token" and owner not in _TOKEN_OWNERS)
        or (words[-1] == "key" and (not owner or owner in _KEY_OWNERS or name.isupper()))
    )
