"""Untyped configurations: nested dicts from YAML, and overrides by dotted path.

Overrides use a subset of Hydra's grammar. ``key=value``, ``+key=value`` and ``++key=value`` are equivalent, and set any field.
``~key`` removes a key of the YAML file. List items are addressed by index: ``actor.scheduling_spec.0.cpu=4``.

Values are YAML. For a setting of type text, only null, quoted text and values in brackets are read as YAML. Other values of
such a setting are taken as written, as in ``trial_name=2024_01``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areno.config.experiment.setting_declaration import paths_of
from areno.errors import UsageError

Tree = dict[str, Any]

_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+|\[\d+\])*")
_NULL = re.compile(r"\s*(null|Null|NULL|~)\s*")


@dataclass(frozen=True)
class Override:
    """Sets the dotted ``path`` to ``value``. If ``delete`` is true, removes the path instead."""

    path: str
    value: Any = None
    delete: bool = False


def read_yaml(path: str | Path) -> Tree:
    """Read a YAML file of nested settings without resolving ``${...}``.

    Raises UsageError: the file cannot be read, is not valid YAML, has duplicate keys, or is not a mapping with text keys.
    """
    path = Path(path).expanduser()
    where = f"--config {path}"
    if not path.is_file():
        raise UsageError(f"--config file does not exist: {path}; pass a YAML file of settings")
    try:
        text = path.read_text(encoding="utf-8")
        tree = OmegaConf.to_container(OmegaConf.create(text if text.strip() else "{}"), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where}{line}: not valid YAML: {error.problem}; correct the file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} cannot be read: {error}; pass a YAML text file") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UsageError(f"{where} is not valid YAML: {error}; correct the file") from error
    if not isinstance(tree, dict) or (len(tree) == 1 and next(iter(tree.values())) is None and ":" not in text):
        raise UsageError(f"{where} is not a mapping of settings; write lines such as `seed: 1`")
    if wrong := [key for key in tree if not isinstance(key, str)]:
        raise UsageError(f"{where}: key {wrong[0]!r} is not the name of a setting; quote or remove the key")
    return {str(key): value for key, value in tree.items()}


class _TextLoader(yaml.SafeLoader):
    """Reads plain scalars as text, except null."""


_TextLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_override(text: str, declaration: type | None = None) -> Override:
    """Parse one override from the command line.

    ``declaration`` is the configuration class of the experiment. If this class declares the setting as text, the value is
    taken as written, with the exceptions that the docstring of this module lists. Without ``declaration``, every value is read
    as YAML.

    Raises UsageError: ``text`` is not of the form ``key=value`` or ``~key``, or the value is not YAML.
    """
    delete = text.startswith("~")
    key, equals, raw = text.removeprefix("~").lstrip("+").partition("=")
    key = key.strip()
    if not _KEY.fullmatch(key) or not (equals or delete):
        raise UsageError(f"argument {text!r} is not an override; write key=value, or ~key to remove a key of the file")
    path = re.sub(r"\[(\d+)\]", r".\1", key)
    if delete:
        return Override(path, delete=True)
    return Override(path, _value(raw, key, is_text=declaration is not None and _is_text(path, declaration)))


def _is_text(path: str, declaration: type) -> bool:
    """Whether the value of a setting, or of a list item, is free text.

    A setting with choices is not free text: its value is read as YAML, so ``on`` and ``off`` are booleans, as in a YAML file.
    """
    paths = paths_of(declaration)
    path = re.sub(r"\.\d+(?=\.)", ".0", path)
    entry = paths.get(path) or paths.get(re.sub(r"\.\d+$", "", path))
    return entry is not None and entry.kind is str and not entry.info.choices


def _value(raw: str, key: str, is_text: bool) -> Any:
    if not raw.strip():
        return ""
    if is_text:
        try:
            # A value that begins with a bracket or quote, such as a list, is YAML, and so is null.
            return yaml.load(raw, _TextLoader) if raw.strip()[0] in "[{\"'" or _NULL.fullmatch(raw) else raw.strip()
        except yaml.YAMLError:
            raise _invalid(key, raw) from None
    if raw.strip().startswith("{"):
        raw = re.sub(r"(?<=[\w\"']):(?=[^\s/:])", ": ", raw)  # Hydra accepts {a:1}, YAML needs {a: 1}
    try:
        loaded = OmegaConf.to_container(OmegaConf.create(f"value: {raw}"), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        if raw.strip()[0] in "[{\"'":
            raise _invalid(key, raw) from None
        return raw  # a string such as "@handle" or "a: b"
    return loaded["value"] if isinstance(loaded, dict) else raw


def _invalid(key: str, raw: str) -> UsageError:
    return UsageError(f"{key}={raw}: the value is not valid YAML; check its brackets and quotes")


def apply_override(tree: Tree, override: Override) -> None:
    """Apply an override to the tree, in place.

    Raises UsageError: the key to remove does not exist, a list has no such index, or a parent key is neither a mapping nor a
    list.
    """
    path = override.path
    *parents, last = path.split(".")
    node: Any = tree
    for depth, name in enumerate(parents):
        key = _key(node, name, path)
        child = node.get(key) if isinstance(node, dict) else node[key]
        if child is None or child == "???":
            child = node[key] = {}
        if not isinstance(child, dict | list):
            parent = ".".join(parents[: depth + 1])
            raise UsageError(
                f"{path}: {parent} is {child!r}, which has no keys to set; set {parent} to a mapping first"
            )
        node = child
    key = _key(node, last, path)
    if not override.delete:
        node[key] = override.value
    elif isinstance(node, dict) and key not in node:
        raise UsageError(f"~{path}: the file does not set {path}, so there is nothing to remove; omit this override")
    else:
        del node[key]


def _key(node: Any, name: str, path: str) -> Any:
    if isinstance(node, dict):
        return name
    if not name.isdigit() or int(name) >= len(node):
        raise UsageError(
            f"{path}: {name} is not an index of a list of {len(node)} items; count from 0, or set the whole list"
        )
    return int(name)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each entry of a tree. A mapping is an entry too, and comes before its content."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        yield path, value
        if isinstance(value, dict):
            yield from leaves(value, path + ".")
