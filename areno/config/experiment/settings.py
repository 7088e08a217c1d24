"""How a field of an experiment is declared: one dataclass field made by ``setting(...)`` or ``section(...)``.

YAML keys, overrides, type and bound checks, help and ``docs/configuration.md`` are made from it, as the flags of
``areno train`` are from ``option(...)``. What is special here: sections nest, and a setting that is not given may take the
value of another one (``inherits``). A plain dataclass field of a user's own class works too; it has no help.
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
"""Pairs of a setting's name inside a section and what is wrong with it."""

_Listing = TypeVar("_Listing", bound=Callable[..., dict[str, "Setting"]])


@dataclass(frozen=True, slots=True)
class Setting(Option):
    """A declared field, its type taken apart; ``default`` of a section is an instance, or None."""

    shape: Shape  # what it holds; ``kind`` is the type of one value, or the class of a section
    nullable: bool  # None is allowed
    owner: str  # name of the class that declares it

    @property
    def is_section(self) -> bool:
        """Whether it holds fields of a class, of one instance or of several."""
        return self.shape in ("section", "sections")

    @property
    def type_text(self) -> str:
        """The type in words, as ``list of int or null``."""
        names = {str: "text", int: "int", float: "float", bool: "bool", dict: "mapping", object: "any value"}
        one = names.get(self.kind, self.kind.__name__)
        text = f"list of {one}" if self.shape in ("list", "sections") else one
        return text + (" or null" if self.nullable else "")

    @property
    def default_text(self) -> str:
        """The default as help and docs show it; empty for sections that are always there."""
        if self.info.shown or self.info.required:
            return self.info.shown or "required"
        if (self.shape == "section" and self.default is not None) or self.shape == "sections":
            return ""
        if self.default is None or isinstance(self.default, bool):
            return {None: "null", True: "true", False: "false"}[self.default]
        return '""' if self.default == "" else f"{self.default}"

    def refusal(self, value: Any) -> str:
        """Words with which a value is refused; empty if it is not."""
        if value == self.default or (value is not None and value == self.info.documented):
            return ""
        return self.info.refused or (self.info.refused_values.get(value, "") if isinstance(value, str) else "")


def setting(default: Any, help: str, **info: Any) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: its value when it is not given; a list or dict is copied for each use.
        help: one or two sentences.
        **info: further fields of `OptionInfo`.
    """
    if isinstance(default, list | dict):
        return section(functools.partial(copy.deepcopy, default), help, **info)
    return option(default, help=help, **info)


def section(factory: Any, help: str, **info: Any) -> Any:
    """Declare a section as a dataclass field.

    Args:
        factory: makes the section when it is not given: its class, or a function for a list of sections; None is absent.
        help: one or two sentences.
        **info: further fields of `OptionInfo`.
    """
    if factory is None:
        return setting(None, help, **info)
    return field(default_factory=factory, metadata={METADATA_KEY: OptionInfo(help=help, **info)})


def _cached(function: _Listing) -> _Listing:
    """``functools.cache``, whose type takes classes of mutable dataclasses for unhashable."""
    return typing.cast(_Listing, functools.cache(function))


@_cached
def settings_of(declaration: type) -> dict[str, Setting]:
    """List the settings of a section's class by name, in order of declaration.

    Raises UsageError: a field has a type that YAML cannot carry, or a plain field has no default.
    """
    hints = typing.get_type_hints(declaration)
    found = {}
    for entry in fields(declaration):
        info = entry.metadata.get(METADATA_KEY) or OptionInfo(help=str(entry.metadata.get("help", "")))
        where = f"{declaration.__name__}.{entry.name}"
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if default is MISSING:
            raise UsageError(f"{where} has no default; give it one")
        shape, kind, nullable = parse_annotation(hints[entry.name])
        if shape is None or shape == "tuple":
            raise UsageError(
                f"{where} has type {hints[entry.name]}; use int, float, str, bool, list, dict, or a dataclass, each also | None"
            )
        # The class that declares it first: a redeclaration with another default is still the same setting.
        owner = [base for base in declaration.__mro__ if entry.name in inspect.get_annotations(base)][-1].__name__
        found[entry.name] = Setting(entry.name, kind, shape == "list", default, info, shape, nullable, owner)
    return found


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Give every setting of a configuration as (dotted path, declaration, value), sections before what is in them."""
    for name, entry in settings_of(type(config)).items():
        path, value = prefix + name, getattr(config, name)
        yield path, entry, value
        if entry.shape == "section" and value is not None:
            yield from walk(value, path + ".")
        if entry.shape == "sections":
            for index, one in enumerate(value or ()):
                yield from walk(one, f"{path}.{index}.")


@_cached
def paths_of(declaration: type, prefix: str = "") -> dict[str, Setting]:
    """Every dotted path that a configuration class knows, sections that are absent by default included.

    Fields of a list of sections stand under their number, as ``rollout.scheduling_spec.0.mem``.
    """
    found = {}
    for name, entry in settings_of(declaration).items():
        path = prefix + name
        found[path] = entry
        if entry.is_section:
            found |= paths_of(entry.kind, path + (".0." if entry.shape == "sections" else "."))
    return found


def changed(config: Any, names: Iterable[str]) -> Iterator[str]:
    """Those of some settings of a section that differ from their defaults."""
    for name in names:
        if getattr(config, name) != settings_of(type(config))[name].default:
            yield name


def idle(config: Any, names: tuple[str, ...], because: str, prefix: str = "") -> Problems:
    """Settings that nothing reads, where they differ from their defaults."""
    for name in changed(config, names):
        yield prefix + name, f"{shown(getattr(config, name))} has no effect {because}"


def at(path: str, problems: Problems) -> Iterator[str]:
    """Problems of a section with its path."""
    return (f"{path}.{name} {problem}" for name, problem in problems)


def shown(value: Any) -> str:
    """A value as YAML writes it; nothing for a section."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | str | dict) else ""
