"""Values of formats that write every argument as text: the tool's JSON schema says what they are."""

from collections.abc import Callable, Mapping
from typing import Any

from areno.text.tool_calls.json_span import load_json

_FLAGS = {"true": True, "false": False}


def typed_arguments(arguments: Mapping[str, str], schema: Any) -> dict[str, Any]:
    """Give each argument the type that the schema of the tool's parameters names.

    A text that does not fit the type stays a text, so that nothing the model said is lost; an argument without a
    declared type is read as JSON where it is JSON.
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(value, types_of(properties.get(name))) for name, value in arguments.items()}


def types_of(schema: Any) -> list[str]:
    """The types that a value may have by its schema, [] where the schema does not say."""
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
    for kind in sorted(types, key=lambda kind: kind == "string"):  # text takes everything, so it comes last
        if kind in _READERS:
            value = _READERS[kind](text)
            if value is not _UNFIT:
                return value
    return text


_UNFIT = object()


def _as_json(text: str, wanted: type) -> Any:
    try:
        value = load_json(text)
    except ValueError:
        return text if wanted is object else _UNFIT
    return value if isinstance(value, wanted) else _UNFIT


def _number(text: str) -> Any:
    value = _as_json(text, float)
    return _integer(text) if value is _UNFIT else value


def _integer(text: str) -> Any:
    try:
        return int(text.strip())
    except ValueError:
        return _UNFIT


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _FLAGS.get(text.strip().lower(), _UNFIT),
    "null": lambda text: None if text.strip().lower() in ("null", "none") else _UNFIT,
    "object": lambda text: _as_json(text, dict),
    "array": lambda text: _as_json(text, list),
}
