"""Declares experiment settings as dataclass fields, with ``setting(...)`` or ``section(...)``.

YAML keys, overrides, help, ``docs/configuration.md``, and the checks of types and bounds are derived from these fields. In the
same way, command-line flags are derived from ``option(...)``. Unlike command-line options, settings can be nested in sections,
and an unset setting can inherit the value of another setting (``inherits``). If a user's class extends a configuration class,
its plain dataclass fields are also settings; their help texts are taken from ``field(metadata={"help": ...})``.
"""

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from areno.config.options import METADATA_KEY, Option, OptionInfo, Shape, option, parse_annotation
from areno.errors import UsageError

Problems = Iterator[tuple[str, str]]
"""Problems with settings of a section. Each problem is a pair: the name of the setting, and the text of the problem."""

_Listing = TypeVar("_Listing", bound=Callable[..., dict[str, "Setting"]])


@dataclass(frozen=True, slots=True)
class Setting(Option):
    """A declared field.

    If the field is a section, the inherited ``kind`` is the class of the section, and ``default`` is an instance of ``kind``,
    a list of instances, or None. For any other field, ``kind`` is the type of the value, or of the items if the value
    is a list.
    """

    shape: Shape
    nullable: bool
    owner: str  # name of the declaring class

    @property
    def is_section(self) -> bool:
        """Whether the field holds a section or a list of sections."""
        return self.shape in ("section", "sections")

    @property
    def type_text(self) -> str:
        """The type in words, such as ``list of int or null``."""
        names = {str: "text", int: "int", float: "float", bool: "bool", dict: "mapping", object: "any value"}
        item = names.get(self.kind, self.kind.__name__)
        text = f"list of {item}" if self.shape in ("list", "sections") else item
        return text + (" or null" if self.nullable else "")

    @property
    def default_text(self) -> str:
        """The default as shown in help and docs.

        For a section, the text is ``null`` if the section is absent by default. Otherwise, the text is empty, because help and
        docs show the defaults of the section's own settings. For a list of sections, the text is empty.
        """
        if self.info.shown or self.info.required:
            return self.info.shown or "required"
        if (self.shape == "section" and self.default is not None) or self.shape == "sections":
            return ""
        if self.default is None or isinstance(self.default, bool):
            return {None: "null", True: "true", False: "false"}[self.default]
        return '""' if self.default == "" else f"{self.default}"

    def refusal(self, value: Any) -> str:
        """Return the reason why a value is rejected; empty if the value is accepted."""
        if value == self.default or (value is not None and value == self.info.documented):
            return ""
        return self.info.refused or (self.info.refused_values.get(value, "") if isinstance(value, str) else "")


def setting(default: Any, help: str, **info: Any) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: default value; a list or dict is copied for each instance.
        help: one or two sentences.
        **info: other fields of `OptionInfo`.
    """
    if isinstance(default, list | dict):
        return section(functools.partial(copy.deepcopy, default), help, **info)
    return option(default, help=help, **info)


def section(factory: Any, help: str, **info: Any) -> Any:
    """Declare a section as a dataclass field.

    Args:
        factory: function that creates the default: the section's class, or a function that returns a list of sections. If
            ``factory`` is None, the default is null.
        help: one or two sentences.
        **info: other fields of `OptionInfo`.
    """
    if factory is None:
        return setting(None, help, **info)
    return field(default_factory=factory, metadata={METADATA_KEY: OptionInfo(help=help, **info)})


def _cached(function: _Listing) -> _Listing:
    """Cache the results of ``function``.

    The returned function keeps the type of ``function``. Otherwise, type checkers would reject classes as arguments if
    instances of these classes are not hashable.
    """
    return typing.cast(_Listing, functools.cache(function))


@_cached
def settings_of(declaration: type) -> dict[str, Setting]:
    """Return a dict from the names of a section's settings to their declarations, in the order of declaration.

    Raises UsageError: the type of a field is unsupported, or a field has no default.
    """
    hints = typing.get_type_hints(declaration)
    declared = {}
    for entry in fields(declaration):
        info = entry.metadata.get(METADATA_KEY) or OptionInfo(help=str(entry.metadata.get("help", "")))
        where = f"{declaration.__name__}.{entry.name}"
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if default is MISSING:
            raise UsageError(f"{where} has no default; add a default")
        shape, kind, nullable = parse_annotation(hints[entry.name])
        if shape is None or shape == "tuple":
            raise UsageError(
                f"{where} has the unsupported type {hints[entry.name]}; use int, float, str, bool, list, dict or a dataclass, "
                "optionally with | None"
            )
        # The base class that first declares the field; a subclass that only changes the default is not its owner.
        owner = [base for base in declaration.__mro__ if entry.name in inspect.get_annotations(base)][-1].__name__
        declared[entry.name] = Setting(entry.name, kind, shape == "list", default, info, shape, nullable, owner)
    return declared


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Yield the dotted path, the declaration and the value of every setting and section of a configuration.

    A section comes before its settings.
    """
    for name, entry in settings_of(type(config)).items():
        path, value = prefix + name, getattr(config, name)
        yield path, entry, value
        if entry.shape == "section" and value is not None:
            yield from walk(value, path + ".")
        if entry.shape == "sections":
            for index, item in enumerate(value or ()):
                yield from walk(item, f"{path}.{index}.")


@_cached
def paths_of(declaration: type, prefix: str = "") -> dict[str, Setting]:
    """Return the declaration of each setting and section of a configuration, by dotted path.

    Optional sections and their settings are included. The path of a field in a list of sections contains the index 0, as in
    ``rollout.scheduling_spec.0.mem``.
    """
    paths = {}
    for name, entry in settings_of(declaration).items():
        path = prefix + name
        paths[path] = entry
        if entry.is_section:
            paths |= paths_of(entry.kind, path + (".0." if entry.shape == "sections" else "."))
    return paths


def changed(config: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield each name in ``names`` whose setting differs from its default."""
    for name in names:
        if getattr(config, name) != settings_of(type(config))[name].default:
            yield name


def ineffective(config: Any, names: tuple[str, ...], because: str, prefix: str = "") -> Problems:
    """Yield the problem "has no effect" for each setting in ``names`` that differs from its default.

    ``because`` is the end of the message, with the reason and the remedy.
    """
    for name in changed(config, names):
        yield prefix + name, f"{shown(getattr(config, name))} has no effect {because}".lstrip()


def at(path: str, problems: Problems) -> Iterator[str]:
    """Return messages about the problems with the section at ``path``. Each message starts with the full path of a setting."""
    return (f"{path}.{name} {problem}" for name, problem in problems)


def shown(value: Any) -> str:
    """Return a value as text in YAML; empty for a section, a list or null."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | str | dict) else ""
