"""Declaration of options. Each option is a dataclass field made by ``option(...)``. The option's flag, YAML key and help are
derived from this field.

The modules ``*_options.py`` of this package declare the options. Algorithms declare options of their own. The settings of
experiments (YAML) are declared in ``experiment/*_sections.py``, with ``setting(...)`` of
``experiment/setting_declaration.py``.

An option has the type with which its dataclass field is annotated: ``int``, ``float``, ``str`` or ``bool``, optionally with
``| None``. A repeatable option has the type ``tuple[int, ...]`` or ``tuple[str, ...]``. This module does not import torch.
"""

import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from areno.errors import UsageError

GROUPS = ("Basic", "Rollout", "Parameter tuning", "Train", "LoRA", "Checkpoint", "Evaluation", "Observability")
"""Help sections, in the order of ``areno train --help``."""

METADATA_KEY = "areno.option"
"""Key under which the metadata of a dataclass field holds its :class:`OptionInfo`."""

Shape = Literal["scalar", "tuple", "list", "dict", "raw", "section", "sections"]
"""Shape of a field's value.

``tuple`` is a repeatable option, ``dict`` a free-form mapping, ``raw`` any YAML value, ``section`` a dataclass, and
``sections`` a list of dataclasses.
"""

_SCALARS = (int, float, str, bool)
_EXPECTED = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_EXAMPLE = {int: "10", float: "0.5", str: "text", bool: "true"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """Metadata of an option besides its name, type and default.

    Attributes:
        stored: whether ``config.yaml`` contains the value. The location of the run is not stored, and neither are options that
            apply to one invocation only.
        path: ``place`` if the value may be the path of a file or folder, ``python`` if the value may be ``file.py:name``. The
            path of an existing file or folder is stored as an absolute path.
        inherits: dotted path of the setting whose value is used if this setting is unset or empty.
        inner: for a section, a mapping from field names to paths that replace the ``inherits`` of these fields. A field that
            is mapped to an empty path inherits nothing.
        documented: AReaL's documented default, if areno's default differs.
    """

    help: str  # one or two sentences for ``--help``
    group: str = ""  # help section; empty for options that an algorithm declares, which get their own section
    metavar: str = ""  # placeholder of the value in help; empty derives it from the type
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    choices: tuple[str, ...] = ()  # allowed values; empty allows all
    algorithms: tuple[str, ...] = ()  # built-in algorithms that read the option; empty means all
    rollout_only: bool = False  # whether only algorithms that generate completions read the option
    changes_results: bool = True  # whether a resumed run must keep the value
    documented_default: str = ""  # text that help shows for a default that depends on the machine
    unset: str = ""  # text that help shows for the default None
    stored: bool = True
    bare: str | None = None  # value of the flag without an argument
    path: Literal["", "place", "python"] = ""
    remedy: str = ""  # advice for a number that is out of bounds; empty states the bounds
    # For experiments only:
    inherits: str = ""
    inner: Mapping[str, str] = field(default_factory=dict)
    required: bool = False  # whether the setting must be set or inherited
    synonyms: Mapping[str, str] = field(default_factory=dict)  # alternative spelling -> value
    shown: str = ""  # default as shown in help and docs; empty shows the value itself
    documented: Any = None
    refused: str = ""  # why only the default (or the documented default) is accepted
    refused_values: Mapping[str, str] = field(default_factory=dict)  # rejected value -> reason
    no_effect: str = ""  # why every value is accepted and ignored


@dataclass(frozen=True, slots=True)
class Option:
    """A declared option. ``many`` is true if the option is repeatable. ``kind`` is the type of each value."""

    name: str
    kind: type
    many: bool
    default: Any
    info: OptionInfo

    @property
    def flag(self) -> str:
        """Command-line flag, such as ``--mini-bs`` for ``mini_bs``."""
        return flag_of(self.name)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help."""
        if self.info.choices:
            return "[" + "|".join(self.info.choices) + "]"
        return self.info.metavar or {int: "INTEGER", float: "FLOAT"}.get(self.kind, "TEXT")

    @property
    def default_text(self) -> str:
        """The default as shown in help; empty if help shows no default."""
        if self.info.documented_default or self.default is None:
            return self.info.documented_default or self.info.unset
        if self.kind is bool:
            return "on" if self.default else ""
        if self.many:
            return ""
        return str(self.default)

    def bounds_problem(self, value: float) -> str:
        """Return the violated bound, such as ``must be positive``; empty if ``value`` is within bounds."""
        info = self.info
        if info.above is not None and not value > info.above:
            return "must be positive" if info.above == 0 else f"must be above {info.above:g}"
        if info.minimum is not None and not value >= info.minimum:
            texts = {0: "must be non-negative"} | ({1: "must be positive"} if self.kind is int else {})
            return texts.get(int(info.minimum), f"must be at least {info.minimum:g}")
        if info.maximum is not None and not value <= info.maximum:
            return f"must be at most {info.maximum:g}"
        if info.below is not None and not value < info.below:
            return f"must be below {info.below:g}"
        return ""

    def number_problem(self, value: float, label: str) -> str:
        """Return an error message if ``value`` is not finite or is out of bounds; otherwise "". ``label`` names the option."""
        if not math.isfinite(value):
            return f"{label} {value} is not a finite number; {self.bounds_remedy}"
        problem = self.bounds_problem(value)
        return problem and f"{label} {problem}, got {value}; {self.bounds_remedy}"

    def value_problem(self, value: Any, label: str) -> str:
        """Return why a value is invalid; empty if it is valid. None is always valid. Other options are not considered."""
        for item in value if self.many else (value,):
            if item is None:
                continue
            if self.info.choices and item not in self.info.choices:
                return f"{label} {item!r} is unknown; choose {', '.join(self.info.choices)}"
            if self.kind in (int, float) and (problem := self.number_problem(item, label)):
                return problem
            if self.many and item == "":
                return f"{label} must not be empty; pass some text, or omit the option"
        return ""

    @property
    def bounds_remedy(self) -> str:
        """Advice that states the allowed values, such as ``give a number above 0``."""
        info = self.info
        if info.remedy:
            return info.remedy
        low = f"above {info.above:g}" if info.above is not None else ""
        low = low or (f"of at least {info.minimum:g}" if info.minimum is not None else "")
        high = f"below {info.below:g}" if info.below is not None else ""
        high = high or (f"at most {info.maximum:g}" if info.maximum is not None else "")
        interval = " and ".join(part for part in (low, high) if part)
        return f"give {_EXPECTED[self.kind]} {interval}".rstrip()


def option(default: Any, **info: Any) -> Any:
    """Declare an option as a dataclass field.

    ``default`` is a tuple if the option is repeatable. ``info`` contains fields of `OptionInfo`.
    """
    return field(default=default, metadata={METADATA_KEY: OptionInfo(**info)})


@functools.cache
def options_of(declaration: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in order; fields not made by ``option`` are skipped."""
    hints = typing.get_type_hints(declaration)
    declared = []
    for entry in fields(declaration):
        if METADATA_KEY in entry.metadata:
            if entry.default is MISSING:
                raise UsageError(f"option {entry.name} of {declaration.__name__} has no default; add a default")
            shape, kind, _ = parse_annotation(hints[entry.name])
            if shape not in ("scalar", "tuple"):
                raise UsageError(
                    f"option {declaration.__name__}.{entry.name} has the unsupported type {hints[entry.name]}; use "
                    "int, float, str or bool, each optionally with | None, or tuple[int, ...] or tuple[str, ...]"
                )
            declared.append(Option(entry.name, kind, shape == "tuple", entry.default, entry.metadata[METADATA_KEY]))
    return tuple(declared)


def check_options(values: Any, prefix: str = "") -> None:
    """Raise `ValueError` if the value of an option is outside the option's bounds or choices. None is always allowed."""
    declaration: type = type(values)
    for entry in options_of(declaration):
        if problem := entry.value_problem(getattr(values, entry.name), f"{prefix}{entry.name}"):
            raise ValueError(problem)


def parse_annotation(hint: Any) -> tuple[Shape | None, type, bool]:
    """Parse the annotation of a field. Return the field's `Shape`, its type, and whether the field may be None.

    For a list or a tuple, the returned type is the type of the items. For a section, it is the section's dataclass. For an
    unsupported annotation, the `Shape` is None.
    """
    nullable = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        nullable = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    if typing.get_origin(hint) is Literal:
        hint = str
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict or hint is dict:
        return "dict", dict, nullable
    if origin is tuple and arguments in ((int, Ellipsis), (str, Ellipsis)):
        return "tuple", arguments[0], nullable
    if origin is list and arguments[0] in (int, str, float):
        return "list", arguments[0], nullable
    if origin is list and is_dataclass(arguments[0]):
        return "sections", typing.cast(type, arguments[0]), nullable
    if is_dataclass(hint):
        return "section", typing.cast(type, hint), nullable
    if hint in _SCALARS:
        return "scalar", hint, nullable
    if hint in (Any, list) or origin in (list, types.UnionType, typing.Union):  # such as a user's class
        return "raw", object, nullable or hint is Any
    return None, object, nullable


def flag_of(name: str) -> str:
    """Return the flag of an option, such as ``--mini-bs`` for ``mini_bs``."""
    return "--" + name.replace("_", "-")


def name_of(spelling: str) -> str:
    """Return the option name of a flag or YAML key."""
    return spelling.removeprefix("--").replace("-", "_")


def did_you_mean(word: str) -> str:
    """Return `` (did you mean WORD?)``; empty if ``word`` is empty."""
    return f" (did you mean {word}?)" if word else ""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` with the candidate closest to ``word``, or "" if none is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return did_you_mean(close[0] if close else "")


def convert(entry: Option, raw: Any, label: str) -> Any:
    """Convert a raw value to the type of an option.

    ``raw`` is the text of a flag, or a scalar or list from YAML. Error messages name the option by ``label``.
    """
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
    if kind is str and isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if kind in (int, float) and isinstance(raw, str):
        try:
            return kind(raw.strip())
        except ValueError:
            pass  # reported below
    if kind is str and isinstance(raw, bool):  # YAML reads the words yes, no, on and off as true and false
        raise UsageError(
            f"{label} {str(raw).lower()}: expected text, not a boolean; put words such as yes, no and off in quotes"
        )
    raise UsageError(f"{label} {raw!r}: expected {_EXPECTED[kind]}, such as {_EXAMPLE[kind]}")
