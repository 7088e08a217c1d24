"""Python functions as tools for a model, described by type hints and docstrings.

The type hint of a parameter determines the JSON schema for the model, and how JSON values are checked and converted to
Python values (:class:`ValueType`). An error in a call is not raised: the error is counted, and its message is the
result for the model.
"""

import collections.abc
import dataclasses
import enum
import inspect
import json
import logging
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from areno.errors import UsageError

logger = logging.getLogger(__name__)

_ARRAYS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    tuple: tuple,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
}
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class ToolError(Exception):
    """A tool call failed. The model receives the error message."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a value, with its JSON schema and a function that reads values.

    ``read`` converts a JSON value to a Python value. If the value is unsuitable, ``read`` raises :class:`ToolError`,
    whose message names the place of the value, such as ``squares[2]``.
    """

    schema: dict[str, Any]
    read: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call. If ``failed`` is true, ``content`` is the error message."""

    name: str
    call_id: str
    content: str
    failed: bool = False

    def message(self) -> dict[str, Any]:
        """Return the result as a message for the model."""
        return {"role": "tool", "tool_call_id": self.call_id, "name": self.name, "content": self.content}


class Tool:
    """A function that a model may call.

    The first paragraph of the docstring describes the tool. An ``Args:`` section or ``Annotated[T, "text"]`` describes
    its parameters. Every parameter needs a type hint. The supported types are ``int``, ``float``, ``str``,
    ``bool``, ``None``, ``Any``, ``Literal`` and enums. Unions, lists, tuples, sets, ``dict[str, T]``, dataclasses and
    ``TypedDict`` are supported if all types in them are supported.

    Args:
        function: sync or async function. A sync function must be fast, because it runs in the event loop.
        name: name of the tool; by default the function's name.

    Raises:
        UsageError: a parameter has no type hint, or a type hint without a JSON representation.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.description, documented = _read_docstring(inspect.getdoc(function) or "")
        hints = _hints_of(function, self.name)
        self._types: dict[str, ValueType] = {}
        self._required: list[str] = []
        properties: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            value_type = self._parameter(parameter, hints)
            self._types[parameter.name] = value_type
            properties[parameter.name] = _described(
                value_type.schema, documented.get(parameter.name), parameter.default
            )
            if parameter.default is parameter.empty:
                self._required.append(parameter.name)
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": self._required,
            "additionalProperties": False,
        }

    def _parameter(self, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> ValueType:
        place = f"tool {self.name}, parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(
                f"{place}: a model can pass arguments only by name; use a named parameter with a type hint"
            )
        if parameter.name not in hints:
            raise UsageError(f"{place}: the parameter has no type hint; add a type hint")
        return value_type_of(hints[parameter.name], place)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def read_arguments(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Check the arguments of a call (a mapping or JSON text), and return the arguments as Python values.

        Raises ToolError if the arguments do not match the schema.
        """
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise ToolError(f"the arguments are not JSON: {error}") from error
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments must be a JSON object, not {_shown(arguments)}")
        unknown = [name for name in arguments if name not in self._types]
        missing = [name for name in self._required if name not in arguments]
        if unknown or missing:
            problem = f"unknown argument {', '.join(unknown)}" if unknown else f"missing argument {', '.join(missing)}"
            takes = f"the arguments {', '.join(self._types)}" if self._types else "no arguments"
            raise ToolError(f"{problem}; the tool {self.name} takes {takes}")
        return {name: self._types[name].read(value, name) for name, value in arguments.items()}

    async def call(self, arguments: str | Mapping[str, Any], call_id: str = "") -> ToolResult:
        """Call the tool; see :meth:`read_arguments` for the arguments. An error is not raised, but becomes a failed result."""
        try:
            value = self.function(**self.read_arguments(arguments))
            value = await value if inspect.isawaitable(value) else value
            return ToolResult(self.name, call_id, as_text(value))
        except ToolError as error:
            return ToolResult(self.name, call_id, f"error: {error}", failed=True)
        except Exception as error:  # the conversation continues; the log has the traceback
            logger.warning("tool %s raised %s: %s", self.name, type(error).__name__, error, exc_info=True)
            return ToolResult(self.name, call_id, f"error: {type(error).__name__}: {error}", failed=True)


class Toolset:
    """Tools by name, with counts of ``calls`` and ``errors``.

    Args:
        source: functions and :class:`Tool` objects, or an object whose public methods are the tools.

    Raises:
        UsageError: two tools share a name, or a function does not meet the requirements of :class:`Tool`.
    """

    def __init__(self, source: object) -> None:
        functions = source if isinstance(source, Iterable) else _public_methods(source)
        tools = [each if isinstance(each, Tool) else Tool(each) for each in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            raise UsageError(
                f"two tools have the name {next(name for name in names if names.count(name) > 1)}; rename one"
            )
        self.calls = 0
        self.errors = 0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """All tools in OpenAI's format."""
        return [tool.schema for tool in self._tools.values()]

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    async def call(self, name: str, arguments: str | Mapping[str, Any], call_id: str = "") -> ToolResult:
        """Call a tool by name; see :meth:`Tool.read_arguments` for the arguments. An unknown name gives a failed result."""
        tool = self._tools.get(name)
        if tool is None:
            text = f"error: there is no tool {name}; the tools are {', '.join(self._tools) or 'none'}"
            result = ToolResult(name, call_id, text, failed=True)
        else:
            result = await tool.call(arguments, call_id)
        self.calls += 1
        self.errors += result.failed
        return result


def as_text(value: Any) -> str:
    """Convert a result to text for the model. Strings are unchanged; other values become JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def value_type_of(hint: Any, place: str) -> ValueType:
    """Return the :class:`ValueType` of a type hint. Raises UsageError if the hint has no JSON representation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or (hint if isinstance(hint, Hashable) else None)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin is typing.Annotated:
        texts = [text for text in arguments[1:] if isinstance(text, str)]
        inner = value_type_of(arguments[0], place)
        return ValueType(_described(inner.schema, " ".join(texts)), inner.read)
    if origin in (typing.Required, typing.NotRequired):
        return value_type_of(arguments[0], place)
    if origin is Literal:
        return _one_of([(value, value) for value in arguments])
    if origin in (Union, types.UnionType):
        return _any_of([value_type_of(each, place) for each in arguments])
    if kind in _ARRAYS:
        return _array(kind, arguments, place)
    if kind in _OBJECTS:
        return _mapping(arguments, place)
    if inspect.isclass(hint):
        if issubclass(hint, enum.Enum):
            return _one_of([(member.value, member) for member in hint])
        if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
            return _record(hint, place)
    raise UsageError(
        f"{place}: the type {hint!r} has no JSON representation; use numbers, text, lists, dicts, Literal or a dataclass"
    )


def _scalar(kind: str, fits: Callable[[Any], bool], make: Callable[[Any], Any]) -> ValueType:
    def read(value: Any, where: str) -> Any:
        if not fits(value):
            raise ToolError(f"{where} must be of type {kind}, not {_shown(value)}")
        return make(value)

    return ValueType({"type": kind}, read)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_SCALARS: dict[Any, ValueType] = {
    str: _scalar("string", lambda v: isinstance(v, str), str),
    bool: _scalar("boolean", lambda v: isinstance(v, bool), bool),
    int: _scalar("integer", lambda v: _is_number(v) and v == v // 1, int),
    float: _scalar("number", _is_number, float),
    type(None): _scalar("null", lambda v: v is None, lambda v: None),
    Any: ValueType({}, lambda value, where: value),
    object: ValueType({}, lambda value, where: value),
}


def _one_of(choices: Sequence[tuple[Any, Any]]) -> ValueType:
    """Return the type that accepts only ``choices``: pairs of a JSON value and the corresponding Python value."""
    kinds = {_SCALARS[type(value)].schema["type"] if type(value) in _SCALARS else "string" for value, _ in choices}
    schema: dict[str, Any] = {"enum": [value for value, _ in choices]}
    if len(kinds) == 1:
        schema = {"type": kinds.pop(), **schema}

    def read(value: Any, where: str) -> Any:
        for choice, meaning in choices:
            # 1.0 matches the choice 1, but True does not.
            if choice == value and isinstance(choice, bool) == isinstance(value, bool):
                return meaning
        listed = ", ".join(json.dumps(choice) for choice, _ in choices)
        raise ToolError(f"{where} must be one of {listed}, not {_shown(value)}")

    return ValueType(schema, read)


def _any_of(branches: Sequence[ValueType]) -> ValueType:
    def read(value: Any, where: str) -> Any:
        problems = []
        for branch in branches:
            try:
                return branch.read(value, where)
            except ToolError as error:
                problems.append(str(error))
        raise ToolError("; or ".join(problems))

    return ValueType({"anyOf": [branch.schema for branch in branches]}, read)


def _array(kind: Any, arguments: Sequence[Any], place: str) -> ValueType:
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        return _fixed_array([value_type_of(each, place) for each in arguments])
    item = value_type_of(arguments[0] if arguments else Any, place)
    make = _ARRAYS[kind]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise ToolError(f"{where} must be of type array, not {_shown(value)}")
        return make([item.read(each, f"{where}[{index}]") for index, each in enumerate(value)])

    return ValueType({"type": "array", "items": item.schema}, read)


def _fixed_array(items: Sequence[ValueType]) -> ValueType:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise ToolError(f"{where} must be an array of length {len(items)}, not {_shown(value)}")
        return tuple(
            item.read(each, f"{where}[{index}]") for index, (item, each) in enumerate(zip(items, value, strict=True))
        )

    sizes = {"minItems": len(items), "maxItems": len(items)}
    return ValueType({"type": "array", "prefixItems": [item.schema for item in items], **sizes}, read)


def _mapping(arguments: Sequence[Any], place: str) -> ValueType:
    key, content = arguments or (str, Any)
    if key is not str:
        raise UsageError(f"{place}: the keys of a JSON object must be text; write dict[str, ...]")
    inner = value_type_of(content, place)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise ToolError(f"{where} must be of type object, not {_shown(value)}")
        return {name: inner.read(each, f"{where}.{name}") for name, each in value.items()}

    return ValueType({"type": "object", "additionalProperties": inner.schema}, read)


def _record(kind: Any, place: str) -> ValueType:
    hints = typing.get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        unset = dataclasses.MISSING
        fields = [field for field in dataclasses.fields(kind) if field.init]
        required = {field.name for field in fields if field.default is unset and field.default_factory is unset}
        hints = {field.name: hints[field.name] for field in fields}
    else:
        # `__required_keys__` ignores NotRequired in hints that are strings.
        wrapped = {name: typing.get_origin(hint) for name, hint in hints.items()}
        required = {name for name in kind.__required_keys__ if wrapped[name] is not typing.NotRequired}
    members = {name: value_type_of(hint, f"{place}.{name}") for name, hint in hints.items()}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise ToolError(f"{where} must be of type object, not {_shown(value)}")
        if missing := sorted(required - value.keys()):
            raise ToolError(
                f"{where} lacks the field {missing[0]}; its required fields are {', '.join(sorted(required))}"
            )
        if unknown := sorted(value.keys() - members.keys()):
            raise ToolError(f"{where} has no field {unknown[0]}; its fields are {', '.join(members)}")
        return kind(**{name: members[name].read(each, f"{where}.{name}") for name, each in value.items()})

    schema: dict[str, Any] = {"type": "object", "properties": {name: each.schema for name, each in members.items()}}
    return ValueType({**schema, "required": sorted(required), "additionalProperties": False}, read)


def _hints_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(called, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"tool {name}: the type hints cannot be resolved: {error}; define or import "
            "the missing name at module level in the file that defines the tool"
        ) from error


def _public_methods(source: object) -> list[Callable[..., Any]]:
    names = [name for name in dir(type(source)) if not name.startswith("_")]
    return [getattr(source, name) for name in names if callable(getattr(type(source), name))]


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the entries of its ``Args:`` section by name."""
    head, _, rest = f"\n{text}".partition("\nArgs:\n")
    if not rest.startswith(" "):  # `inspect.getdoc` removes the indentation if the docstring has no other section
        rest = textwrap.indent(rest, "    ")
    described: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        entry = re.match(r" {2,4}(\w+)(?: \([^)]*\))?: *(.*)", line)
        if entry:
            name = entry[1]
            described[name] = entry[2]
        elif name and line.strip():
            described[name] += f" {line.strip()}"
    return " ".join(head.strip().split("\n\n")[0].split()), described


def _described(schema: dict[str, Any], text: str | None, default: Any = inspect.Parameter.empty) -> dict[str, Any]:
    added: dict[str, Any] = {"description": text} if text else {}
    if default is not inspect.Parameter.empty:
        added["default"] = json.loads(json.dumps(default, default=_plain))
    return {**schema, **added}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.value
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"
