"""Converts text arguments to the types of the tool's JSON schema, for formats that write all values as text."""

from collections.abc import Callable, Mapping
from typing import Any

from areno.text.tool_calls.json_span import load_json

_FLAGS = {"true": True, "false": False}


def typed_arguments(arguments: Mapping[str, str], schema: Any) -> dict[str, Any]:
    """Convert each argument to the type declared by the tool's parameter schema.

    Text that does not match the type stays text, so that nothing is lost. An argument without a declared type is parsed
    as JSON if possible.
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(value, types_of(properties.get(name))) for name, value in arguments.items()}


def types_of(schema: Any) -> list[str]:
    """The types that a schema allows; [] if the schema specifies no type."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    if declared is not None:
        return [declared] if isinstance(declared, str) else [str(one) for one in declared]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ["string"] if all(isinstance(value, str) for value in values) else []
    branches = [branch for key in ("anyOf", "oneOf", "allOf") for branch in schema.get(key) or []]
    return [kind for branch in branches for kind in types_of(branch)]


def _typed(text: str, types: list[str]) -> Any:
    if not types:
        return _as_json(text, object)
    for kind in sorted(types, key=lambda kind: kind == "string"):  # a string matches any text, so try it last
        if kind in _CONVERTERS:
            value = _CONVERTERS[kind](text)
            if value is not _MISMATCH:
                return value
    return text


_MISMATCH = object()


def _as_json(text: str, expected: type) -> Any:
    try:
        value = load_json(text)
    except ValueError:
        return text if expected is object else _MISMATCH
    return value if isinstance(value, expected) else _MISMATCH


def _number(text: str) -> Any:
    value = _as_json(text, float)
    return _integer(text) if value is _MISMATCH else value


def _integer(text: str) -> Any:
    try:
        return int(text.strip())
    except ValueError:
        return _MISMATCH


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _FLAGS.get(text.strip().lower(), _MISMATCH),
    "null": lambda text: None if text.strip().lower() in ("null", "none") else _MISMATCH,
    "object": lambda text: _as_json(text, dict),
    "array": lambda text: _as_json(text, list),
}
