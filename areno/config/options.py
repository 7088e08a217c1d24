"""How an option is declared: one dataclass field made by ``option(...)``, from which all else is derived.

Its type is the annotation: ``int``, ``float``, ``str``, ``bool``, each also ``| None``, and ``tuple[int, ...]`` or
``tuple[str, ...]`` for repeatable options. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from areno.errors import UsageError

GROUPS = ("Basic", "Rollout", "Parameter tuning", "Train", "LoRA", "Checkpoint", "Evaluation", "Observability")
"""Help sections, in the order in which ``areno train --help`` shows them."""

METADATA_KEY = "areno.option"
"""Where the metadata of a field holds its declaration."""

_SCALARS = (int, float, str, bool)
_EXPECTED = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_EXAMPLE = {int: "10", float: "0.5", str: "text", bool: "true"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """Everything about an option that its name, type and default do not say.

    Attributes:
        stored: written to ``config.yaml``; False for options that belong to one invocation or to the place of the run.
        path: ``place`` may be a file or folder, ``python`` a ``file.py:name``; what exists is stored as an absolute path.
    """

    help: str  # one or two sentences for ``--help``
    group: str = ""  # help section; a user's algorithm leaves it empty and gets a section of its own
    metavar: str = ""  # placeholder of the value in help; empty derives it from the type
    minimum: float | None = None  # least allowed value
    maximum: float | None = None  # greatest allowed value
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    choices: tuple[str, ...] = ()  # the only allowed values; empty allows all
    algorithms: tuple[str, ...] = ()  # algorithms that read the option; empty means all
    rollout_only: bool = False  # only algorithms that generate completions read it
    changes_results: bool = True  # a resumed run may not change it
    documented_default: str = ""  # text for help where the default depends on the machine
    unset: str = ""  # what happens when the option is not given and its default is None
    stored: bool = True
    bare: str | None = None  # value of the flag when it is given without one
    path: Literal["", "place", "python"] = ""


@dataclass(frozen=True, slots=True)
class Option:
    """A declared option, its type taken apart: ``kind`` is the type of one value, ``many`` says it is repeatable."""

    name: str
    kind: type
    many: bool
    default: Any
    info: OptionInfo

    @property
    def flag(self) -> str:
        """Command-line spelling, ``--mini-bs`` for ``mini_bs``."""
        return flag_of(self.name)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help."""
        if self.info.choices:
            return "[" + "|".join(self.info.choices) + "]"
        return self.info.metavar or {int: "INTEGER", float: "FLOAT"}.get(self.kind, "TEXT")

    @property
    def default_text(self) -> str:
        """The default as help shows it; empty where there is nothing to say."""
        if self.info.documented_default or self.default is None:
            return self.info.documented_default or self.info.unset
        if self.kind is bool:
            return "on" if self.default else ""
        if self.many:
            return ""
        return str(self.default)

    def bounds_problem(self, value: float) -> str:
        """The bound that ``value`` breaks, as ``must be positive``; empty when it breaks none."""
        info = self.info
        if info.above is not None and not value > info.above:
            return "must be positive" if info.above == 0 else f"must be above {info.above:g}"
        if info.minimum is not None and not value >= info.minimum:
            named = {0: "must be non-negative"} | ({1: "must be positive"} if self.kind is int else {})
            return named.get(int(info.minimum), f"must be at least {info.minimum:g}")
        if info.maximum is not None and not value <= info.maximum:
            return f"must be at most {info.maximum:g}"
        if info.below is not None and not value < info.below:
            return f"must be below {info.below:g}"
        return ""

    @property
    def bounds_remedy(self) -> str:
        """The allowed interval in words."""
        info = self.info
        low = f"above {info.above:g}" if info.above is not None else ""
        low = low or (f"from {info.minimum:g}" if info.minimum is not None else "")
        high = f"below {info.below:g}" if info.below is not None else ""
        high = high or (f"up to {info.maximum:g}" if info.maximum is not None else "")
        interval = " and ".join(part for part in (low, high) if part)
        return f"give {_EXPECTED[self.kind]} {interval}".rstrip()


def option(default: Any, **info: Any) -> Any:
    """Declare an option as a dataclass field: its default (a tuple if it is repeatable) and the fields of `OptionInfo`."""
    return field(default=default, metadata={METADATA_KEY: OptionInfo(**info)})


@functools.cache
def options_of(declaration: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in order; fields not made by ``option`` are left out."""
    hints = typing.get_type_hints(declaration)
    found = []
    for entry in fields(declaration):
        if METADATA_KEY in entry.metadata:
            if entry.default is MISSING:
                raise UsageError(f"option {entry.name} of {declaration.__name__} has no default; give it one")
            kind, many = _take_apart(hints[entry.name], f"{declaration.__name__}.{entry.name}")
            found.append(Option(entry.name, kind, many, entry.default, entry.metadata[METADATA_KEY]))
    return tuple(found)


def check_options(values: Any, prefix: str = "") -> None:
    """Raise a `ValueError` for the first option of a dataclass outside its bounds or choices; None is always allowed."""
    declaration: type = type(values)
    for entry in options_of(declaration):
        value = getattr(values, entry.name)
        if value is None:
            continue
        if entry.info.choices and value not in entry.info.choices:
            raise ValueError(
                f"{prefix}{entry.name} {value!r} is unknown; choose one of: {', '.join(entry.info.choices)}"
            )
        if entry.kind in (int, float) and (problem := entry.bounds_problem(value)):
            raise ValueError(f"{prefix}{entry.name} {problem}, got {value}; {entry.bounds_remedy}")


def _take_apart(hint: Any, where: str) -> tuple[type, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        hint = members[0] if len(members) == 1 else hint
    many = typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (Ellipsis,)
    kind = typing.get_args(hint)[0] if many else hint
    if kind not in _SCALARS or (many and kind not in (int, str)):
        raise UsageError(
            f"option {where} has type {hint}; use int, float, str, bool, one of these | None, or tuple[int | str, ...]"
        )
    return kind, many


def flag_of(name: str) -> str:
    """Spell an option name as its flag."""
    return "--" + name.replace("_", "-")


def name_of(spelling: str) -> str:
    """Spell a flag or YAML key as the option's name."""
    return spelling.removeprefix("--").replace("-", "_")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known word closest to ``word``, or nothing if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def convert(entry: Option, raw: Any, label: str) -> Any:
    """Turn text from a flag, or a scalar or list from YAML, into the option's type; ``label`` names the option in an error."""
    if not entry.many:
        return _convert_one(entry, raw, label)
    items: list[Any] = list(raw) if isinstance(raw, list | tuple) else [raw]
    if entry.kind is int:
        items = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    return tuple(_convert_one(entry, item, label) for item in items)


def _convert_one(entry: Option, raw: Any, label: str) -> Any:
    kind = entry.kind
    if isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool)):
        return raw
    if kind is str and isinstance(raw, int | float):
        return str(raw)
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if kind in (int, float) and isinstance(raw, str):
        try:
            return kind(raw.strip())
        except ValueError:
            pass  # the message below is the one place that reports a wrong type
    raise UsageError(f"{label} {raw!r}: expected {_EXPECTED[kind]}, such as {_EXAMPLE[kind]}")
