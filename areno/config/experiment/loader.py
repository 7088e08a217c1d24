"""Loads the configuration of an experiment: reads its YAML file, applies overrides, and checks the result.

    config, file = load_expr_config(sys.argv[1:], GRPOConfig)

The file may contain any subset of the settings. Names and paths that several sections share need to be set only once.
"""

import copy
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areno.config.experiment.allocation import AllocationMode, ModelAllocation
from areno.config.experiment.build import ALIASES, build_config, unknown_key, without_aliases
from areno.config.experiment.checks import check_config
from areno.config.experiment.experiments import EXPERIMENTS, BaseExperimentConfig
from areno.config.experiment.named_algorithm import with_presets
from areno.config.experiment.setting_declaration import settings_of
from areno.config.experiment.tree import Tree, apply_override, leaves, parse_override, read_yaml
from areno.config.options import nearest
from areno.config.parser import Problems
from areno.errors import UsageError, first_line

Config = TypeVar("Config", bound=BaseExperimentConfig)


@dataclass(frozen=True)
class CliArgs:
    """The command line of an experiment: YAML file, raw overrides, and whether to print help."""

    config_file: str
    overrides: tuple[str, ...]
    help: bool = False


def parse_cli_args(argv: Sequence[str]) -> CliArgs:
    """Parse the command line. If the first word is the program's name (``*.py``), this word is ignored.

    Raises UsageError: ``--config`` has no value, or an option is unknown.
    """
    is_program = bool(argv) and argv[0].endswith(".py") and not re.match(r"-|[~+]*[\w.]+=", argv[0])
    words = list(argv[1:] if is_program else argv)
    file, overrides, wants_help = "", [], False
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            wants_help = True
        elif word == "--config" or word.startswith("--config="):
            if word == "--config" and not words:
                raise UsageError("--config needs a value; write --config FILE.yaml")
            file = word.partition("=")[2] if "=" in word else words.pop(0)
        elif word.startswith("-"):
            name = word.partition("=")[0]
            if name == "--tune-params":
                raise UsageError(
                    "--tune-params is not an option of a run; to find a concurrency and a microbatch size that fit into "
                    f"memory, run `areno plan {file or 'FILE.yaml'} --tune-params`, and write both values into the file"
                )
            near = nearest(name, ["--config", "--help"])
            raise UsageError(f"{name} is not an option{near}; settings are written as key=value, without dashes")
        else:
            overrides.append(word)
    return CliArgs(file, tuple(overrides), wants_help)


def load_expr_config(argv: Sequence[str], config_cls: type[Config]) -> tuple[Config, str]:
    """Load the configuration of an experiment from its command line.

    Args:
        argv: arguments, with or without the program's name.
        config_cls: class of the experiment, such as GRPOConfig or a user's subclass.

    Returns:
        The checked configuration, and the path of its file.

    Raises:
        UsageError: the configuration is invalid.
        SystemExit: with code 0 after ``--help``.
    """
    args = parse_cli_args(argv)
    if args.help:
        sys.stdout.write(render_help(config_cls))
        raise SystemExit(0)
    tree = _overridden(without_aliases(_file(args)), args, config_cls)
    return config_from(tree, config_cls), args.config_file


def experiment_class(argv: Sequence[str]) -> type[BaseExperimentConfig]:
    """Return the configuration class that ``train_dataset.type`` selects, such as `SFTConfig` for the type ``sft``.

    Raises UsageError: the file cannot be read, or the type is unknown.
    """
    args = parse_cli_args(argv)
    tree = _overridden(_file(args), args)
    dataset = tree.get("train_dataset")
    if dataset is None and {"resources", "run"} <= tree.keys():
        raise UsageError(
            f"--config {args.config_file} is a task of a cluster launcher (with the keys `resources` and `run`), not an "
            "experiment; pass the experiment's YAML file, whose path is in the `run` command of the task"
        )
    kind = dataset.get("type") if isinstance(dataset, dict) else None
    if any(isinstance(value, str) and "${" in value for value in (dataset, kind)):
        try:
            kind = OmegaConf.select(OmegaConf.create(tree), "train_dataset.type")
        except OmegaConfBaseException as error:
            raise UsageError(
                f"train_dataset.type {kind or dataset} cannot be resolved: {first_line(error)}; write the type without ${{...}}"
            ) from None
    if not isinstance(kind, str) or kind not in EXPERIMENTS:
        raise UsageError(f"train_dataset.type {kind!r} is unknown; choose {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[kind]


def config_from(tree: Tree, config_cls: type[Config]) -> Config:
    """Build a configuration from raw values and check the result. Raises UsageError if the configuration is invalid."""
    problems = Problems()
    config = build_config(with_presets(allocated(tree, config_cls)), config_cls, problems)
    for text in check_config(config) if config is not None else ():
        problems.add(text)
    problems.raise_if_any()
    assert config is not None  # None implies problems
    config.explicit_paths = frozenset(path for path, _ in leaves(tree))
    return config


to_structured_cfg = config_from
"""`config_from` under the name that AReaL's API uses."""


def settled(config: Config) -> Config:
    """Return a checked copy of a configuration, such as one that was built in Python.

    The copy treats a setting as set by the user if ``config.explicit_paths`` contains its path, or if its value differs from
    the default. Raises UsageError if the configuration is invalid.
    """
    return config_from(_set_values(config, config.explicit_paths), type(config))


def _set_values(config: Any, explicit: Collection[str], prefix: str = "") -> Tree:
    tree: Tree = {}
    for name, entry in settings_of(type(config)).items():
        path, value = prefix + name, getattr(config, name)
        if entry.shape == "section":
            inner = None if value is None else _set_values(value, explicit, path + ".")
            if inner or path in explicit or (value is None) != (entry.default is None):
                tree[name] = inner
        elif entry.shape == "sections":
            tree[name] = [_set_values(item, explicit, f"{path}.{index}.") for index, item in enumerate(value)]
        elif path in explicit or value != entry.default:
            tree[name] = value
    return tree


def allocated(tree: Tree, config_cls: type[BaseExperimentConfig]) -> Tree:
    """Return a copy of the raw configuration ``tree`` in which each role has the backend that ``allocation_mode`` assigns.

    If ``allocation_mode`` is not set, ``tree`` is returned unchanged.

    Raises UsageError: ``allocation_mode`` is malformed, names a role without a section, or contradicts a ``backend``.
    """
    text = tree.get("allocation_mode")
    if not isinstance(text, str) or text in ("", "???"):
        return tree
    tree = copy.deepcopy(tree)
    try:
        mode = AllocationMode.from_str(text)
        backends, shared = mode.backends(), mode.colocated()
    except UsageError as error:
        raise UsageError(f"allocation_mode {error}") from None
    for role, backend in backends.items():
        if role == "rollout" and role not in settings_of(config_cls) and len(mode.components) == 1:
            continue  # bare sizes apply to all existing engines
        section = tree.setdefault(role, {}) if role in ("rollout", "actor") else tree.get(role)
        if not isinstance(section, dict):
            raise UsageError(
                f"allocation_mode {text!r} assigns {backend} to {role}, but there is no section {role}; use rollout, actor, "
                "or another existing section"
            )
        explicit = section.get("backend") or backend
        if explicit != backend and _spec(explicit) != backend:
            raise UsageError(
                f"{role}.backend {explicit} differs from {backend} of allocation_mode {text}; remove one of the two settings"
            )
        section["backend"] = backend
        if role in shared and shared[role] in settings_of(config_cls):
            section.setdefault("scheduling_strategy", {"type": "colocation", "target": shared[role]})
    return tree


def _spec(backend: str) -> str:
    try:
        return ModelAllocation.from_str(backend).spec
    except UsageError:
        return backend


def _file(args: CliArgs) -> Tree:
    if not args.config_file:
        raise UsageError("--config is required; pass the experiment's YAML file as --config FILE.yaml")
    return read_yaml(Path(args.config_file))


def _overridden(tree: Tree, args: CliArgs, config_cls: type[BaseExperimentConfig] | None = None) -> Tree:
    """Apply the overrides of the command line to ``tree``, and return ``tree``.

    Raises UsageError: an override is malformed, or sets a key whose first part is not a field of ``config_cls`` (if given).
    """
    problems = Problems()
    for text in args.overrides:
        try:
            override = parse_override(text, config_cls)
            path = ALIASES.get(override.path, override.path)
            if config_cls and not override.delete and path.partition(".")[0] not in settings_of(config_cls):
                raise UsageError(unknown_key(path, config_cls))
            apply_override(tree, replace(override, path=path))
        except UsageError as error:
            problems.add(str(error))
    problems.raise_if_any()
    return tree


def render_help(config_cls: type[BaseExperimentConfig]) -> str:
    """Format the help on all keys of an experiment, with a final newline."""
    doc = " ".join((config_cls.__doc__ or "").split("\n\n")[0].split())
    head = [
        "usage: PROGRAM.py --config FILE.yaml [key=value ...] [+key=value ...] [~key ...]",
        "",
        f"{config_cls.__name__}: {doc}",
        "Set any key in the file or on the command line. null means no value; lists are written [a, b].",
    ]
    return "\n".join([*head, *_section_help(config_cls, "", set())]) + "\n"


def _section_help(declaration: type, prefix: str, shown: set[type]) -> Iterator[str]:
    yield from ("", f"{prefix.rstrip('.') or 'Experiment'}:")
    entries = settings_of(declaration)
    for name, entry in entries.items():
        text = entry.info.help + (f" One of: {', '.join(entry.info.choices)}." if entry.info.choices else "")
        if entry.is_section and entry.kind in shown:
            text += f" Same keys as {entry.kind.__name__} above."
        yield f"  {prefix}{name}: {entry.type_text}" + (f" = {entry.default_text}" if entry.default_text else "")
        yield from textwrap.wrap(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    for name, entry in entries.items():
        if entry.is_section and entry.kind not in shown:
            shown.add(entry.kind)
            inside = f"{prefix}{name}{'.0' if entry.shape == 'sections' else ''}."
            yield from _section_help(entry.kind, inside, shown)
