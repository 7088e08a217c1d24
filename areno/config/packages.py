"""Optional packages: detects missing packages without importing any, and builds the command that installs them."""

import importlib.util
import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlparse

from areno.errors import UsageError

_PACKAGE = Path(__file__).parents[1]
_MODULES_OF_EXTRAS = {
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "gguf": ("gguf",),
    "kernels": ("kernels",),
    "lora": ("peft",),
    "qlora": ("peft", "bitsandbytes"),
}


def transformers_problem(what: str, major: int, minor: int) -> str:
    """Return an error message if transformers is older than ``major.minor``; otherwise empty. ``what`` starts the message."""
    installed = version("transformers")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) >= (major, minor):
        return ""
    return f"{what} needs transformers {major}.{minor} or newer, but {installed} is installed; upgrade transformers"


def install_command(extra: str) -> str:
    """Return a command that installs an extra for the running interpreter.

    If the source folder is known, the command installs the extra from that folder. Otherwise, it installs each package of the
    extra by name. The command is not ``pip install areno[...]``, because PyPI has another project named areno.
    """
    folder, editable = _source_folder()
    source = [*(["--editable"] if editable else []), f"{folder}[{extra}]"]
    requirements = _packages_of(extra) if folder is None else source
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def _source_folder() -> tuple[Path | None, bool]:
    """Return the project's source folder (None if unknown), and whether areno is imported from that folder."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        return _PACKAGE.parent, True
    try:
        origin = json.loads(distribution("areno").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None, False
    folder = Path(unquote(urlparse(origin.get("url", "")).path))
    return (folder if "dir_info" in origin and folder.is_dir() else None), False


def _packages_of(extra: str) -> list[str]:
    """Return the packages that an extra of areno requires, as listed in the metadata of the installed areno package."""
    marker = f'extra == "{extra}"'
    requirements = [requirement.replace("'", '"') for requirement in distribution("areno").requires or []]
    return [requirement.split(";")[0].strip() for requirement in requirements if marker in requirement]


def missing_packages(extra: str) -> str:
    """Return ``the packages ...; install them: ...`` for the missing packages of an extra, or "" if none is missing."""
    missing = [name for name in _MODULES_OF_EXTRAS[extra] if importlib.util.find_spec(name) is None]
    return f"the packages {', '.join(missing)}; install them: {install_command(extra)}" if missing else ""


def require_packages(extra: str, subject: str) -> None:
    """Raise UsageError if packages of an extra are missing. The message starts with ``subject``, such as ``agents need``."""
    if missing := missing_packages(extra):
        raise UsageError(f"{subject} {missing}")
