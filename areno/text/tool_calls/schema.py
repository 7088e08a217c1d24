"""Convert text arguments to the types in a tool's JSON schema, for formats that write all values as text."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from areno.text.tool_calls.json_span import load_json

_FLAGS = {"true": True, "false": False}
_INTEGER = re.compile(r"\s*[-+]?[0-9]+\s*")


def typed_arguments(arguments: Mapping[str, str], schema: Any) -> dict[str, Any]:
    """Convert each argument to the type declared by the tool's parameter schema.

    Text that does not match the type stays text. An argument without a declared type is parsed as JSON, or stays text
    if the argument is not JSON.
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(value, types_of(properties.get(name), schema)) for name, value in arguments.items()}


def types_of(schema: Any, root: Any) -> list[str]:
    """Return the types that a schema allows; [] if the schema has no type or is invalid.

    ``root`` contains the definitions to which the schema refers.
    """
    return _types(schema, root, set())


def resolved(schema: Any, root: Any) -> Any:
    """Return the definition in ``root`` to which ``schema`` refers, together with the other keys of ``schema``.

    A reference has the form ``{"$ref": "#/..."}``. If ``schema`` is not a reference, or if ``root`` lacks the definition,
    ``schema`` is returned unchanged.
    """
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target = root
    for part in reference[2:].split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return {**target, **rest} if isinstance(target, Mapping) else schema


def _types(schema: Any, root: Any, seen: set[str]) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    while "$ref" in schema and (reference := str(schema["$ref"])) not in seen:  # a definition may refer to itself
        seen.add(reference)
        schema = resolved(schema, root)
    declared = schema.get("type")
    if declared is not None:
        kinds = declared if isinstance(declared, list) else [declared]
        return [kind for kind in kinds if isinstance(kind, str)]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ["string"] if isinstance(values, list) and all(isinstance(value, str) for value in values) else []
    lists = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    branches = [branch for one in lists if isinstance(one, list) for branch in one]
    return [kind for branch in branches for kind in _types(branch, root, seen)]


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
        return int(text) if _INTEGER.fullmatch(text) else _MISMATCH
    except ValueError:  # too many digits
        return _MISMATCH


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _FLAGS.get(text.strip().lower(), _MISMATCH),
    "null": lambda text: None if text.strip().lower() in ("null", "none") else _MISMATCH,
    "object": lambda text: _as_json(text, dict),
    "array": lambda text: _as_json(text, list),
}
