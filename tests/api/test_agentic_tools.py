"""Functions as tools: the schema describes what the reader accepts, and errors become text for the model."""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest

from areno.api.agentic.tools import Tool, ToolError, Toolset, value_type_of
from areno.errors import UsageError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list)


class Step(TypedDict):
    action: Literal["go", "stop"]
    speed: NotRequired[float]


class Tree(TypedDict):
    point: Point
    steps: dict[str, Step]


HINTS = [
    *(int, float, str, bool, type(None), Any, list, dict, list[int], list[list[str]], dict[str, int], tuple[int, str]),
    *(tuple[int, ...], int | None, int | str, Literal[1, 2], Literal["a", 1, None], Color, Point, Step, Tree),
    *(list[Step], Annotated[int, "a number"], dict[str, Any]),
]
POINT = {"x": 1, "y": 2, "tags": ["a"]}
VALUES = [
    *(0, 1, 2, -3, 1.0, 1.5, 10**20, True, False, None, "", "a", "red", "1", [], [1], [1, "a"], ["a"], [["a"]], [[1]]),
    *([1, 2, 3], [True], {}, {"a": 1}, {"a": "b"}, POINT, {"x": 1}, {"y": 1}, {"x": "1"}, {"x": 1, "z": 2}),
    *({"action": "go"}, {"action": "go", "speed": 2}, {"action": "fly"}, {"speed": 1.0}, [{"action": "stop"}]),
    *({"point": POINT, "steps": {}}, {"point": POINT, "steps": {"s": {"action": "go"}}}, {"point": {}, "steps": {}}),
]


def reads(hint, value):
    try:
        value_type_of(hint, "test").read(value, "value")
    except ToolError:
        return False
    return True


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_the_reader_accepts_exactly_what_the_schema_allows(hint):
    schema = value_type_of(hint, "test").schema
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    disagreeing = [value for value in VALUES if reads(hint, value) != validator.is_valid(value)]
    assert disagreeing == []


def test_every_hint_accepts_some_value_and_all_but_one_refuse_some():
    # Otherwise the comparison above could pass vacuously.
    taken = {str(hint): sum(reads(hint, value) for value in VALUES) for hint in HINTS}
    assert all(taken.values()), taken
    assert sum(count < len(VALUES) for count in taken.values()) == len(HINTS) - 1


def test_values_become_python_objects():
    assert value_type_of(Tree, "t").read({"point": {"x": 1}, "steps": {"s": {"action": "go"}}}, "v") == {
        "point": Point(1),
        "steps": {"s": {"action": "go"}},
    }
    assert value_type_of(Color, "t").read("red", "v") is Color.RED
    assert value_type_of(tuple[int, str], "t").read([1, "a"], "v") == (1, "a")
    assert value_type_of(set[int], "t").read([1, 1], "v") == {1}
    whole = value_type_of(int, "t").read(2.0, "v")
    assert (whole, type(whole)) == (2, int)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("hint", [int, float, list[float]])
def test_non_finite_numbers_are_refused(hint, value):
    assert not reads(hint, json.loads(value))
    assert not reads(hint, [json.loads(value)])


def test_errors_name_the_path_of_a_wrong_value():
    with pytest.raises(ToolError, match=re.escape('value.steps.s.action must be one of "go", "stop", not "fly"')):
        value_type_of(Tree, "t").read({"point": {"x": 1}, "steps": {"s": {"action": "fly"}}}, "value")
    with pytest.raises(ToolError, match=re.escape("value[1] must be of type integer, not true")):
        value_type_of(list[int], "t").read([1, True], "value")
    with pytest.raises(ToolError, match=re.escape("value lacks the field x; its required fields are x")):
        value_type_of(Point, "t").read({"y": 1}, "value")
    with pytest.raises(ToolError, match=re.escape("value has no field z; its fields are x, y, tags")):
        value_type_of(Point, "t").read({"x": 1, "z": 1}, "value")


def order(item: str, count: int = 1, size: Literal["small", "large"] | None = None) -> dict[str, Any]:
    """Order something
    from the shop.

    It arrives later.

    Args:
        item: what it is called,
            as in the catalog.
        count (int): how many.

    Returns:
        What was ordered.
    """
    return {"item": item, "count": count, "size": size}


def test_a_function_is_described_in_openais_format():
    assert Tool(order).schema == {
        "type": "function",
        "function": {
            "name": "order",
            "description": "Order something from the shop.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "what it is called, as in the catalog."},
                    "count": {"type": "integer", "description": "how many.", "default": 1},
                    "size": {
                        "anyOf": [{"type": "string", "enum": ["small", "large"]}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }


def call(tools, name, arguments):
    return asyncio.run(Toolset(tools).call(name, arguments, "id1"))


def test_results_are_returned_as_text_with_the_call_id():
    result = call([order], "order", '{"item": "ä", "count": 2}')
    assert json.loads(result.content) == {"item": "ä", "count": 2, "size": None}
    assert "ä" in result.content
    assert result.message() == {"role": "tool", "tool_call_id": "id1", "name": "order", "content": result.content}
    assert not result.failed


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain", "plain"), (None, "null"), (3, "3"), (Point(1), '{"x": 1, "y": 0, "tags": []}'), (Color.RED, '"red"')],
)
def test_any_value_can_be_returned(value, text):
    def give() -> Any:
        return value

    assert call([give], "give", "{}").content == text


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("order", '{"item": "a"', "the arguments are not JSON"),
        ("order", "[1]", "must be a JSON object, not [1]"),
        ("order", "{}", "missing argument item; the tool order takes the arguments item, count, size"),
        (
            "order",
            '{"item": "a", "color": 1}',
            "unknown argument color; the tool order takes the arguments item, count, size",
        ),
        ("order", '{"item": 5}', "item must be of type string, not 5"),
        ("sell", "{}", "there is no tool sell; the tools are order"),
    ],
)
def test_a_wrong_call_returns_an_error_instead_of_raising(name, arguments, message):
    result = call([order], name, arguments)
    assert result.failed
    assert result.content.startswith("error: ")
    assert message in result.content


def test_exceptions_of_tools_become_results_and_bugs_are_logged(caplog):
    def refuse() -> None:
        raise ToolError("not today")

    def broken() -> float:
        return 1 / 0

    assert call([refuse], "refuse", "").content == "error: not today"
    assert caplog.text == ""
    assert call([broken], "broken", "").content == "error: ZeroDivisionError: division by zero"
    assert "in broken" in caplog.text


def test_calls_and_errors_are_counted():
    tools = Toolset([order])

    async def several():
        for arguments in ('{"item": "a"}', "{}", '{"item": "b"}'):
            await tools.call("order", arguments)
        await tools.call("sell", "{}")

    asyncio.run(several())
    assert (tools.calls, tools.errors) == (4, 2)


class Shop:
    """Its public methods are tools."""

    def __init__(self) -> None:
        self.sold = itertools.count(1)

    def sell(self, count: int) -> int:
        """Sell."""
        return next(self.sold) * count

    async def close(self) -> str:
        """Close."""
        await asyncio.sleep(0)
        return "closed"

    def _secret(self) -> None: ...


def test_an_objects_public_methods_are_its_tools_and_keep_its_state():
    tools = Toolset(Shop())
    assert [schema["function"]["name"] for schema in tools.schemas] == ["close", "sell"]
    assert "_secret" not in tools

    async def several():
        return [(await tools.call(*each)).content for each in (("sell", '{"count": 5}'),) * 2 + (("close", ""),)]

    assert asyncio.run(several()) == ["5", "10", "closed"]


def only_arguments(size: Annotated[int, {"unit": "m"}, "in meters"], parts: list[Annotated[str, []]]) -> None:
    """Args:
    parts: names
        of the parts.
    """


def test_a_docstring_may_have_only_arguments_and_hints_may_have_further_annotations():
    schema = Tool(only_arguments).schema["function"]
    assert schema["description"] == ""
    assert schema["parameters"]["properties"] == {
        "size": {"type": "integer", "description": "in meters"},
        "parts": {"type": "array", "items": {"type": "string"}, "description": "names of the parts."},
    }


def not_a_hint(value: [int]) -> None: ...


def no_hint(value): ...


def any_number(*values: int) -> None: ...


def odd_type(value: complex) -> None: ...


def odd_keys(value: dict[int, str]) -> None: ...


def unknown_name(value: Missing) -> None: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_hint, "tool no_hint, parameter value: the parameter has no type hint"),
        (any_number, "parameter values: a model can pass arguments only by name"),
        (odd_type, "parameter value: .*complex.* has no JSON representation"),
        (not_a_hint, r"tool not_a_hint, parameter value: the type \[<class 'int'>\] has no JSON representation"),
        (odd_keys, "the keys of a JSON object must be text"),
        (unknown_name, "tool unknown_name: the type hints cannot be resolved: name 'Missing'"),
    ],
)
def test_functions_that_cannot_be_described_are_refused_at_once(function, message):
    with pytest.raises(UsageError, match=message):
        Tool(function)


def test_two_tools_with_the_same_name_are_refused():
    with pytest.raises(UsageError, match="two tools have the name order"):
        Toolset([order, Tool(no_arguments, "order")])


def no_arguments() -> None: ...
