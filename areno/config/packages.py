"""Optional packages: which are missing, found out without importing them, and how to install them."""

import importlib.util
import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from areno.errors import UsageError

_PACKAGE = Path(__file__).parents[1]
_IMPORTED = {
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "gguf": ("gguf",),
    "kernels": ("kernels",),
    "lora": ("peft",),
    "qlora": ("peft", "bitsandbytes"),
}


def install_command(extra: str) -> str:
    """A command that installs an extra of this areno for the running interpreter: of its folder, or else its packages.

    Not ``pip install areno[...]``: PyPI has another project of that name.
    """
    folder, editable = _source_folder()
    named = [*(["--editable"] if editable else []), f"{folder}[{extra}]"]
    wanted = _packages_of(extra) if folder is None else named
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])


def _source_folder() -> tuple[Path | None, bool]:
    """The project's folder, and whether the package is used from within it."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        return _PACKAGE.parent, True
    try:
        origin = json.loads(distribution("areno").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None, False
    folder = Path(unquote(urlparse(origin.get("url", "")).path))
    return (folder if "dir_info" in origin and folder.is_dir() else None), False


def _packages_of(extra: str) -> list[str]:
    """Requirements of an extra, as the installed package states them."""
    mark = f'extra == "{extra}"'
    needs = [need.replace("'", '"') for need in distribution("areno").requires or []]
    return [need.split(";")[0].strip() for need in needs if mark in need]


def missing_packages(extra: str) -> str:
    """What an extra lacks here, as the end of a sentence: ``the packages ...; install them: ...``; empty if nothing."""
    missing = [name for name in _IMPORTED[extra] if importlib.util.find_spec(name) is None]
    return f"the packages {', '.join(missing)}; install them: {install_command(extra)}" if missing else ""


def require_packages(extra: str, who: str) -> None:
    """Raise a `UsageError` if an extra lacks packages here; ``who`` is the start of its sentence, such as ``agents need``."""
    if missing := missing_packages(extra):
        raise UsageError(f"{who} {missing}")
