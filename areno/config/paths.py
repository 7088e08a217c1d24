"""Distinguishes paths from hub references, and checks both without network access.

A text that looks like a path must name an existing path. Otherwise, a mistyped path would be mistaken for a repo id.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from areno.config.packages import require_packages, transformers_problem
from areno.errors import UsageError
from areno.storage.gguf import gguf_folder, is_gguf

RUNS_ROOT = Path("runs")
"""Parent folder of runs that are started without ``--run-dir``. ``--resume`` without a path looks for runs in this folder."""

DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")
"""Data formats that ``--dataset-path`` reads."""

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file that identifies the folder of a PEFT adapter."""

_FILE_SUFFIXES = (*DATA_SUFFIXES, ".safetensors", ".gguf", ".bin", ".pt", ".gz", ".zst", ".txt", ".py", ".yaml")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def looks_like_path(text: str) -> bool:
    """Whether ``text`` has the form of a path, such as ``./a``, ``~/a``, ``a/``, ``a/b/c`` or ``a.json``."""
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.lower().endswith(_FILE_SUFFIXES)
        or text.rstrip("/").count("/") > 1
        or text.endswith("/")
    )


def absolute_if_exists(value: Any, *, python: bool) -> Any:
    """Make the path of an existing file or folder absolute. Other values, such as a repo id, are returned unchanged.

    If ``python`` is true, ``value`` is ``file.py``, ``file.py:name`` or a name without a file. In ``file.py:name``, only the
    part ``file.py`` becomes absolute. A name without a file is returned unchanged.
    """
    if not isinstance(value, str) or not value or (python and ".py" not in value):
        return value
    end = value.rindex(".py") + len(".py") if python else len(value)
    path = Path(value[:end]).expanduser()
    return f"{path.absolute()}{value[end:]}" if path.exists() else value


def is_address(path: str | None) -> bool:
    """Whether ``path`` is the address of a server."""
    return bool(path) and str(path).startswith(("http://", "https://"))


def ckpt_problem(text: str, option: str = "--ckpt") -> str:
    """Return why a model reference is invalid; empty if the reference is valid.

    For a local model, the files are checked. For a repo id, only the form is checked.
    """
    path = Path(text).expanduser()
    if path.exists():
        return _model_folder_problem(path, option)
    if looks_like_path(text):
        return f"{option} folder does not exist: {text}; pass a model folder, or a repo id such as Qwen/Qwen3-0.6B"
    if not _REPO.fullmatch(text):
        return f"{option} {text!r} is neither a folder nor a repo id; write a repo id as owner/name"
    return ""


def _model_folder_problem(path: Path, option: str) -> str:
    if is_adapter(path) or is_gguf(path):
        return _base_problem(path, option)
    if not path.is_dir():
        return f"{option} {path} is a file; pass the folder that contains config.json and the weights, or a .gguf file"
    config = path / "config.json"
    if not config.is_file():
        return (
            f"{option} {path} has no config.json; pass a folder in Hugging Face format, as written by save_pretrained"
        )
    try:
        loaded = _read_json(config, "save the model again")
    except UsageError as error:
        return f"{option} {error}"
    return "" if isinstance(loaded, dict) else f"{option} {config} is not a JSON object; save the model again"


def _read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file. Raises UsageError with ``remedy`` if the content is invalid, or if the file cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}; make the file readable") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}; {remedy}") from error


def is_adapter(path: str | Path) -> bool:
    """Whether the folder ``path`` contains a PEFT adapter but no model."""
    folder = Path(path).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_config(folder: str | Path) -> dict[str, Any]:
    """Read the ``adapter_config.json`` of an adapter folder.

    Raises UsageError if the file is invalid, or specifies no base model.
    """
    path = Path(folder).expanduser() / ADAPTER_CONFIG
    config = _read_json(path, "save the adapter again")
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise UsageError(f"{path} has no base_model_name_or_path; add the base model's folder or repo id")
    return config


def base_of(model: str) -> str:
    """Return the folder or repo id of a model. For an adapter, return its base model.

    For a GGUF file, convert the file to a cached model folder, and return this folder. A leading ``~`` is expanded, because
    ``transformers`` would mistake the path for a repo id.
    """
    base = str(adapter_config(model)["base_model_name_or_path"]) if is_adapter(model) else model
    if is_gguf(base):
        require_packages("gguf", f"{base} needs")
        if problem := transformers_problem(f"{base}: reading GGUF", 5, 18):
            raise UsageError(problem)
        base = str(gguf_folder(base))
    return str(Path(base).expanduser()) if base.startswith("~") else base


def tokenizer_of(model: str) -> str:
    """Return the folder or repo id of a model's tokenizer. For an adapter without a tokenizer, return the base model."""
    has_tokenizer = (Path(model).expanduser() / "tokenizer_config.json").is_file()
    return model if has_tokenizer else base_of(model)


def adapter_problem(text: str, option: str) -> str:
    """Return why an adapter folder is unusable; empty if the folder is usable."""
    path = Path(text).expanduser()
    if not path.is_dir():
        return f"{option} folder does not exist: {text}; pass the folder of a PEFT adapter"
    if not (path / ADAPTER_CONFIG).is_file():
        return (
            f"{option} {text} has no {ADAPTER_CONFIG}; pass the folder of a PEFT adapter, or omit the option for a new "
            "adapter"
        )
    return ""


def _base_problem(path: Path, option: str) -> str:
    """Return why an adapter or a GGUF file cannot be used as a model; empty if it can be used.

    For an adapter, the base model is checked. A GGUF file is checked by converting the file to a cached model folder.
    """
    try:
        base = base_of(str(path))
    except UsageError as error:
        return f"{option} {error}"
    if is_adapter(base):
        return (
            f"{option} {path / ADAPTER_CONFIG}: the base model {base} is itself an adapter; merge {base} into its "
            "own base model with `areno export`"
        )
    problem = ckpt_problem(base, "base_model_name_or_path")
    return f"{option} {path / ADAPTER_CONFIG}: {problem}; correct the file" if problem else ""


def dataset_problem(text: str, *, has_loader: bool, option: str = "--dataset-path") -> str:
    """Return why a data path or a hub reference ``repo[:config[:split]]`` is invalid; empty if it is valid.

    If ``has_loader`` is true, a user's function loads the data, so any text that does not look like a path is accepted.
    """
    path = Path(text).expanduser()
    if path.exists():
        return _data_file_problem(path, has_loader, option)
    reference, *parts = text.split(":")
    if looks_like_path(text) or looks_like_path(reference):
        return f"{option} does not exist: {text}; pass a file, a folder, or a hub reference name[:config[:split]]"
    if has_loader:
        return ""
    if len(parts) > 2:
        return f"{option} {text!r} has {len(parts) + 1} parts; write a hub reference as name[:config[:split]]"
    if not _REPO.fullmatch(reference) or not all(parts):
        return (
            f"{option} {text!r} is neither a path nor a hub reference; write a hub reference as name[:config[:split]]"
        )
    return ""


def _data_file_problem(path: Path, has_loader: bool, option: str) -> str:
    if path.is_dir():
        return "" if any(path.iterdir()) else f"{option} {path} is an empty folder; pass a folder with data files"
    if path.suffix.lower() not in DATA_SUFFIXES and not has_loader:
        formats = ", ".join(DATA_SUFFIXES)
        return f"{option} {path} has an unsupported format; use {formats}, or pass --dataset-loader-fn"
    if path.stat().st_size == 0:
        return f"{option} {path} is empty; pass a file with at least one row"
    return ""


def unwritable(path: Path, option: str) -> str:
    """Return why ``path`` cannot be used as a writable directory; empty if ``path`` can be used. No directory is created."""
    existing = path.expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{option} {path}: {existing} is a file; choose a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{option} {path}: {existing} is not writable; make {existing} writable, or choose another directory"
    return ""
