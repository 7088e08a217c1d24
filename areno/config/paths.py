"""Tells paths from hub references, and checks both without opening a network connection.

A name that looks like a path but is missing is an error: a typo must never turn into a download.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from areno.config.packages import require_packages
from areno.errors import UsageError
from areno.storage.gguf import gguf_folder, is_gguf

DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")
"""Data formats that ``--dataset-path`` reads."""

ADAPTER_CONFIG = "adapter_config.json"
"""What makes a folder a PEFT adapter."""

_FILE_SUFFIXES = (*DATA_SUFFIXES, ".safetensors", ".gguf", ".bin", ".pt", ".gz", ".zst", ".txt", ".py", ".yaml")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def looks_like_path(text: str) -> bool:
    """Whether ``text`` can only mean a file or folder: by its start, a backslash, a file suffix or several slashes."""
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.lower().endswith(_FILE_SUFFIXES)
        or text.rstrip("/").count("/") > 1
        or text.endswith("/")
    )


def anchored(value: Any, *, python: bool) -> Any:
    """The name of a file or folder that exists as an absolute path; anything else, such as a repo id, as it is.

    With ``python`` it is ``file.py`` or ``file.py:name``, or a name that no file has.
    """
    if not isinstance(value, str) or (python and ".py" not in value):
        return value
    end = value.rindex(".py") + len(".py") if python else len(value)
    path = Path(value[:end]).expanduser()
    return f"{path.absolute()}{value[end:]}" if path.exists() else value


def is_address(path: str | None) -> bool:
    """Whether a model is named by the address of a server."""
    return bool(path) and str(path).startswith(("http://", "https://"))


def ckpt_problem(text: str, option: str = "--ckpt") -> str:
    """Say why a model reference cannot work; empty for a usable local folder and for any well-formed repo id."""
    path = Path(text).expanduser()
    if path.exists():
        return _model_folder_problem(path, option)
    if looks_like_path(text):
        return f"{option} folder does not exist: {text}; give a model folder, or a repo id such as Qwen/Qwen3-0.6B"
    if not _REPO.fullmatch(text):
        return f"{option} {text!r} is neither a folder nor a repo id; write a repo id as owner/name"
    return ""


def _model_folder_problem(path: Path, option: str) -> str:
    if is_adapter(path) or is_gguf(path):
        return _base_problem(path, option)
    if not path.is_dir():
        return f"{option} {path} is a file; give the folder that holds config.json and the weights, or a .gguf file"
    config = path / "config.json"
    if not config.is_file():
        return f"{option} {path} has no config.json; give a folder in Hugging Face format, as save_pretrained writes it"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{option} {config} is not readable JSON: {error}; save the model again"
    return ""


def is_adapter(place: str | Path) -> bool:
    """Whether ``place`` is the folder of a PEFT adapter, which holds no model of its own."""
    folder = Path(place).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_config(place: str | Path) -> dict[str, Any]:
    """Read the ``adapter_config.json`` of an adapter folder, which must name a base model."""
    path = Path(place).expanduser() / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not readable JSON: {error}; save the adapter again") from error
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise UsageError(f"{path} names no base_model_name_or_path; write the base model's folder or repo id there")
    return config


def base_of(place: str) -> str:
    """The folder or repo id of a model: an adapter stands for its base, a GGUF file for its folder in the cache."""
    base = str(adapter_config(place)["base_model_name_or_path"]) if is_adapter(place) else place
    if is_gguf(base):
        require_packages("gguf", f"{base} needs")
        base = str(gguf_folder(base))
    return base


def tokenizer_of(place: str) -> str:
    """Where the tokenizer of a model lies: with an adapter that ships one, else with its base model."""
    ships_one = (Path(place).expanduser() / "tokenizer_config.json").is_file()
    return place if ships_one else base_of(place)


def adapter_problem(text: str, option: str) -> str:
    """Say why an adapter folder cannot work; empty if it can."""
    path = Path(text).expanduser()
    if not path.is_dir():
        return f"{option} folder does not exist: {text}; give the folder of a PEFT adapter"
    if not (path / ADAPTER_CONFIG).is_file():
        return (
            f"{option} {text} has no {ADAPTER_CONFIG}; give the folder of a PEFT adapter, or leave it out for a new one"
        )
    return ""


def _base_problem(path: Path, option: str) -> str:
    """Why the model that an adapter or a GGUF file stands for cannot be had."""
    try:
        base = base_of(str(path))
    except UsageError as error:
        return f"{option} {error}"
    if is_adapter(base):
        return f"{option} {path / ADAPTER_CONFIG}: its base model {base} is an adapter itself; merge that with areno export"
    problem = ckpt_problem(base, "base_model_name_or_path")
    return f"{option} {path / ADAPTER_CONFIG}: {problem}; correct the file" if problem else ""


def dataset_problem(text: str, *, has_loader: bool, option: str = "--dataset-path") -> str:
    """Why a path or ``repo[:config[:split]]`` cannot work; a loader of the user's may give other texts a meaning."""
    path = Path(text).expanduser()
    if path.exists():
        return _data_file_problem(path, has_loader, option)
    reference, *parts = text.split(":")
    if looks_like_path(text) or looks_like_path(reference):
        return f"{option} does not exist: {text}; give a file, a folder, or a hub reference name[:config[:split]]"
    if has_loader:
        return ""
    if len(parts) > 2:
        return f"{option} {text!r} has {len(parts) + 1} parts; a hub reference is name[:config[:split]]"
    if not _REPO.fullmatch(reference) or not all(parts):
        return f"{option} {text!r} is neither a path nor a hub reference; write it as name[:config[:split]]"
    return ""


def _data_file_problem(path: Path, has_loader: bool, option: str) -> str:
    if path.is_dir():
        return "" if any(path.iterdir()) else f"{option} {path} is an empty folder; give one that holds data files"
    if path.suffix.lower() not in DATA_SUFFIXES and not has_loader:
        known = ", ".join(DATA_SUFFIXES)
        return f"{option} {path} has no known format; use {known}, or read it in a --dataset-loader-fn"
    if path.stat().st_size == 0:
        return f"{option} {path} is empty; give a file with at least one row"
    return ""


def unwritable(path: Path, option: str) -> str:
    """Say why no directory can be made or written at ``path``; empty if it can. Creates nothing."""
    existing = path.expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{option} {path}: {existing} is a file; choose a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{option} {path}: {existing} cannot be written; choose another directory, or change its permissions"
    return ""
