"""Builds a configuration from raw values: adds defaults, resolves interpolations, and checks types and bounds.

First, each unset setting gets a value: its default or, if it inherits from another setting, the interpolation ``${path}`` with
the path of that setting. A single pass then resolves all interpolations, which may refer to any setting.
"""

import copy
import difflib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.setting_declaration import Setting, paths_of, settings_of
from areno.config.experiment.tree import Override, Tree, apply_override, leaves
from areno.config.options import convert, did_you_mean, nearest
from areno.config.parser import Problems
from areno.errors import UsageError

Config = TypeVar("Config", bound=BaseExperimentConfig)

ALIASES = {"actor.lr": "actor.optimizer.lr", "critic.lr": "critic.optimizer.lr"}
"""Aliases of settings, each with the full path of the setting."""

_REJECTION = "is now rejection_sampling.upper; write rejection_sampling: {upper: NUMBER} instead"
MOVED = {
    "behave_imp_weight_cap": _REJECTION,
    "behav_imp_weight_cap": _REJECTION,
    "behave_imp_weight_mode": (
        "is now the section rejection_sampling; instead of token_mask, write {level: token, action: mask}; instead of "
        "token_truncate, write {level: token, action: clamp}; instead of sequence_mask, write {level: sequence, action: mask}; "
        "instead of sequence_truncate, write {level: sequence, action: clamp}; instead of disabled, write null"
    ),
    "group_size": "is gconfig.n_samples in areno; set gconfig.n_samples, the number of answers per prompt, and remove the key",
    "dynamic_sampling": "is not a setting of areno; use workflow.dynamic_filter_fn, or success_rate_lb and success_rate_ub, to "
    "filter groups",
    "recompute_logprobs": "is spelled recompute_logprob",
    "reward_fn_path": "is reward.fn in areno; write reward.fn=file.py:NAME instead",
    "model_path": "is actor.path in areno; write actor.path=MODEL instead",
    "max_turns": "is an argument of the workflow; write workflow.kwargs.max_turns=N instead",
    "max_llm_calls_per_run": "is an argument of the workflow; write workflow.kwargs.max_llm_calls_per_run=N instead",
    "agent_builder_path": "specifies an agent; write rollout.agent.agent_cls_path=file.py:NAME instead",
    "agent_run_args": "are arguments of the agent; write each argument as workflow.kwargs.NAME=VALUE instead",
    "eval_workflow": "is not a setting of areno, which uses the training workflow for evaluation too; remove the key",
    "n_trajs": "is gconfig.n_samples in areno; write gconfig.n_samples=N instead",
    "max_tokens_per_trajectory": "is gconfig.max_tokens in areno; write gconfig.max_tokens=N instead",
}
"""Hints for unknown keys that occur in files for earlier AReaL versions, or in published YAML files of other programs. The
dictionary maps the last component of a key's path to a hint. The error message consists of the key's path and the hint.
"""

_MISSING = "???"
_PATH = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")


def build_config(values: Tree, config_cls: type[Config], problems: Problems) -> Config | None:
    """Build a configuration from raw values, without checking combinations (see `areno.config.experiment.checks`).

    Args:
        values: nested dicts from YAML; not changed.
        config_cls: class of the experiment.
        problems: receives messages about unknown, missing, ill-typed or out-of-bounds settings and invalid interpolations.

    Returns:
        The configuration without its unknown keys; None if a value is missing or invalid.
    """
    values = without_aliases(values)
    known = dict(leaves(values))
    context = _Context(config_cls, config_cls.dependent_defaults(known), problems, Problems())
    config = None
    try:
        config = _typed(_resolve(_with_defaults(values, config_cls, context), known), config_cls, "", context)
    except UsageError as error:
        problems.add(str(error))
    for problem in context.problems.messages:
        problems.add(problem)
    return config


def without_aliases(values: Tree) -> Tree:
    """Return a copy in which aliases, such as ``actor.lr``, are replaced by the setting's full path.

    Raises UsageError if both an alias and the full path are set.
    """
    tree = copy.deepcopy(values)
    for alias, path in ALIASES.items():
        known = dict(leaves(tree))
        if alias in known:
            if path in known:
                raise UsageError(f"{alias} and {path} are the same setting, but both are set; remove one of them")
            apply_override(tree, Override(alias, delete=True))
            apply_override(tree, Override(path, known[alias]))
    return tree


def unknown_key(path: str, root: type, value: Any = None) -> str:
    """Return the error message for an unknown key of a configuration.

    If ``MOVED`` has a hint for the key, the message contains this hint. Otherwise, the message suggests the setting with the
    most similar name, if any.
    """
    section, _, last = path.rpartition(".")
    if section == "teacher" and last in settings_of(
        TrainEngineConfig
    ):  # deprecated form of teacher, with its own engine
        return (
            "teacher: areno starts no separate engine for the teacher, so the section has no engine settings; keep path, "
            "rl_loss_weight and distill_loss_weight, and remove the other settings"
        )
    if last in MOVED:
        return f"{path} {MOVED[last]}"
    near = "" if isinstance(value, Mapping) and not _alike(value, root) else nearest_path(path, list(paths_of(root)))
    better = "correct or remove the key" if near else "remove the key"
    return (
        f"{path} is not a setting of {root.__name__}{did_you_mean(near)}; {better}, or declare the key in your own subclass of "
        f"{root.__name__}"
    )


def _alike(value: Mapping[str, Any], root: type) -> bool:
    """Whether ``value`` looks like a section whose name is mistyped: most of its keys are settings of one known section."""
    kinds = {entry.kind for entry in paths_of(root).values() if entry.is_section}
    return any(2 * len(set(value) & set(settings_of(kind))) > len(value) for kind in kinds)


def nearest_path(path: str, candidates: list[str]) -> str:
    """Return the candidate that a user who wrote ``path`` probably meant; "" if no candidate is similar.

    If ``path`` has several components and a candidate is very similar to ``path``, return the most similar candidate.
    Otherwise, look for candidates with the same last component as ``path``, and return the one with the fewest components. If
    there is none, return the most similar candidate.
    """
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, candidates, n=1, cutoff=0.75)
    same = [other for other in candidates if other.rpartition(".")[2] == last]
    if same and (not close or "." not in path):
        return min(same, key=lambda p: (p.count("."), not p.startswith(("actor.", "train_dataset.")), len(p)))
    return (close or difflib.get_close_matches(path, candidates, n=1, cutoff=0.6) or [""])[0]


@dataclass(frozen=True)
class _Context:
    root: type[BaseExperimentConfig]
    extra: Mapping[str, Any]  # defaults that override declared ones, by path
    unknown: Problems
    problems: Problems
    inherited: set[str] = field(default_factory=set)  # paths of settings with inherited values


def _with_defaults(values: Tree, declaration: type, context: _Context, prefix: str = "", inner: Any = None) -> Tree:
    entries = settings_of(declaration)
    for key, value in values.items():
        if str(key) not in entries:
            context.unknown.add(unknown_key(f"{prefix}{key}", context.root, value))
    full: Tree = {}
    for name, entry in entries.items():
        path, value = prefix + name, values.get(name, _MISSING)
        inherits = (inner or {}).get(name, entry.info.inherits)
        if entry.shape == "section":
            full[name] = _section_tree(value, entry, context, path)
        elif entry.shape == "sections":
            items = [{}] * len(entry.default or ()) if value in (None, _MISSING) else _items(value)
            full[name] = items
            if isinstance(items, list):
                full[name] = [
                    _with_defaults(item, entry.kind, context, f"{path}.{index}.") if isinstance(item, dict) else item
                    for index, item in enumerate(items)
                ]
        elif _is_unset(value, entry) and inherits in paths_of(context.root) and inherits != path:
            full[name] = "${" + inherits + "}"
            context.inherited.add(path)
        else:
            full[name] = context.extra.get(path, entry.default) if value == _MISSING else value
    return full


def _is_unset(value: Any, entry: Setting) -> bool:
    return (isinstance(value, str) and value in ("", _MISSING)) or (value is None and entry.default in (None, "", 0))


def _section_tree(value: Any, entry: Setting, context: _Context, path: str) -> Any:
    if isinstance(value, str) and value != _MISSING and "${" in value:
        return value
    if not isinstance(value, dict) and value not in (None, _MISSING):
        better = f"; write {path}.path={value}" if "path" in settings_of(entry.kind) else ""
        context.unknown.add(f"{path} {value!r}: expected a mapping of the settings of {entry.kind.__name__}{better}")
        value = _MISSING
    if value == _MISSING or (value is None and not entry.nullable):
        value = None if entry.default is None else {}
    return None if value is None else _with_defaults(value, entry.kind, context, path + ".", entry.info.inner)


def _items(value: Any) -> Any:
    """Return the sections of a setting such as ``scheduling_spec`` as a list.

    The value may also be a dict that maps indices to sections, such as ``{"0": {...}}``, or a single section without a list.
    """
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return [value.get(str(index), {}) for index in range(max(int(key) for key in value) + 1)]
    return [value] if isinstance(value, dict) else value


def _resolve(full: Tree, known: Mapping[str, Any]) -> Any:
    with suppress(LookupError, RecursionError):
        return _followed(full, full)
    try:
        return OmegaConf.to_container(OmegaConf.create(full), resolve=True)
    except InterpolationKeyError as error:
        target = re.sub(r"^Interpolation key '(.*)' not found.*$", r"\1", str(error.msg).splitlines()[0])
        hint = did_you_mean(nearest_path(target, [path for path, _ in leaves(full)]))
        where = next(
            (path for path, value in known.items() if not isinstance(value, dict) and f"${{{target}}}" in str(value)),
            error.full_key,
        )
        raise UsageError(f"{where}: ${{{target}}} does not refer to a setting{hint}; correct the name") from error
    except OmegaConfBaseException as error:
        text = str(error.msg or error).splitlines()[0]
        raise UsageError(
            f"{error.full_key}: the interpolation cannot be resolved: {text}; correct the interpolation"
        ) from error


def _followed(value: Any, root: Tree) -> Any:
    """Return a copy in which each ``${path}`` is replaced by the value at the path. OmegaConf takes 30 ms longer.

    Dicts and lists are processed recursively. Raises LookupError if an item is not a dict, list, number, text or null. Also
    raises LookupError if ``${...}`` is not the path of a number, text or null.
    """
    if isinstance(value, dict):
        return {key: _followed(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_followed(item, root) for item in value]
    if not isinstance(value, str | int | float | None):
        raise LookupError(value)
    if not isinstance(value, str) or "${" not in value:
        return value
    target: Any = root
    path = _PATH.fullmatch(value)
    for name in path[1].split(".") if path else ("",):
        target = target.get(name, _MISSING) if isinstance(target, dict) else _MISSING
    if isinstance(target, dict | list) or target == _MISSING:
        raise LookupError(value)
    return _followed(target, root)


def _typed(values: Mapping[str, Any], declaration: type, prefix: str, context: _Context) -> Any:
    fields: dict[str, Any] = {}
    entries = settings_of(declaration)
    if foreign := sorted(values.keys() - entries.keys()):  # a whole section was interpolated
        context.problems.add(
            f"{prefix.rstrip('.')}: the section that ${{...}} refers to has the settings {', '.join(foreign)}, but "
            f"{declaration.__name__} has no such settings; replace the path in ${{...}} by the path of a section "
            f"of type {declaration.__name__}"
        )
        return None
    for name, entry in entries.items():
        path = prefix + name
        try:
            fields[name] = _value(values.get(name, entry.default), entry, path, context)
        except UsageError as error:
            if path not in context.inherited:  # an inherited value is reported for the setting that it comes from
                context.problems.add(str(error))
    if len(fields) < len(entries) or (context.problems.messages and not prefix):
        return None
    try:
        return declaration(**fields)
    except ValueError as error:  # from a user's class
        context.problems.add(f"{prefix.rstrip('.') or declaration.__name__}: {error}")
        return None


def _value(value: Any, entry: Setting, path: str, context: _Context) -> Any:
    if value == _MISSING or (entry.info.required and value in ("", None)):
        raise UsageError(f"{path} is required; {entry.info.help[0].lower()}{entry.info.help[1:]}")
    if value is None:
        if entry.nullable:
            return None
        expected = {"scalar": "a value", "list": "a list, such as []", "dict": "a mapping, such as {}"}
        raise UsageError(
            f"{path} must not be null; set {path} to {expected.get(entry.shape, 'a value')}, or remove {path}"
        )
    if entry.shape == "section":
        if not isinstance(value, Mapping):
            raise UsageError(f"{path} {value!r}: expected a mapping of {entry.kind.__name__}'s settings")
        return _typed(value, entry.kind, path + ".", context)
    if entry.shape == "sections":
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise UsageError(
                f"{path} {value!r}: expected a list of mappings, each with settings of {entry.kind.__name__}"
            )
        return [_typed(item, entry.kind, f"{path}.{index}.", context) for index, item in enumerate(value)]
    if entry.shape == "dict":
        if not isinstance(value, Mapping):
            raise UsageError(f"{path} {value!r}: expected a mapping, such as {{key: value}}")
        return {str(key): item for key, item in value.items()}
    return value if entry.shape == "raw" else _plain(value, entry, path)


def _plain(value: Any, entry: Setting, path: str) -> Any:
    """Convert a scalar or a list of scalars, and check choices and bounds."""
    if entry.nullable and entry.info.choices and str(value).lower() in ("none", "null"):
        return None
    if isinstance(value, str):
        value = entry.info.synonyms.get(value, value)
    if isinstance(value, bool) and entry.kind is str:  # YAML reads the choices on and off as true and false
        switches = ("on", "online") if value else ("off", "disabled")
        value = next((text for text in switches if text in entry.info.choices), value)
    if isinstance(value, bool) and entry.kind is not bool:
        raise UsageError(f"{path} {str(value).lower()}: expected {entry.type_text}; quote the value if it is text")
    if isinstance(value, list | dict) and entry.shape == "scalar":
        raise UsageError(f"{path} {value!r}: expected one value ({entry.type_text})")
    converted = convert(entry, value, path)
    for item in converted if entry.shape == "list" else (converted,):
        if entry.info.choices and item not in entry.info.choices:
            choices = ", ".join((*entry.info.choices, *(["null"] if entry.nullable else [])))
            raise UsageError(f"{path} {item!r} is unknown{nearest(str(item), entry.info.choices)}; choose {choices}")
        if entry.kind in (int, float) and (problem := entry.number_problem(item, path)):
            raise UsageError(problem)
    return list(converted) if entry.shape == "list" else converted
