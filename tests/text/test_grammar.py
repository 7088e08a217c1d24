"""Constrained answers: whichever of the allowed tokens a model picks, the finished text fits the grammar."""

import json
import random
import re
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.config.packages import install_command
from areno.errors import EngineError, UsageError
from areno.text import grammar
from areno.text.grammar import json_object_constraint, json_schema_constraint, tool_call_constraint
from areno.text.tool_calls import parser_for
from tests.support.examples import examples, some_quick
from tests.support.tiny import bpe_tokenizer
from tests.text.tool_call_cases import TOOLS, WRITERS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
FORMATS = ["hermes", "qwen", "json", "llama3", "mistral", "mistral_args", "deepseek", "deepseek_v31"]
TAG_TOKENS = {"glm": ["</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]}
TAGGED = ["qwen3_coder", "glm", "minicpm", "minimax"]


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(['{"name": "Ada", "age": 36, "arguments": {"city": [1, true, null]}}\n'] * 9)


def _walk(tokenizer, factory, seed, limit=400, ending=""):
    """Sample allowed tokens at random; after a while prefer those that end the text, starting with ``ending``."""
    draw, state, ids, planned = random.Random(seed), factory(tokenizer), [], []
    hurry = [tokenizer.convert_tokens_to_ids(char) for char in '"}],:0']
    while True:
        allowed = np.flatnonzero(state.allowed())
        assert len(allowed), tokenizer.decode(ids)
        complete = tokenizer.eos_token_id in allowed
        if complete and (state.finished or len(ids) > limit or draw.random() < 0.2):
            return tokenizer.decode(ids)
        assert not state.finished
        choice = [token for token in allowed if token != tokenizer.eos_token_id]
        late = len(ids) > limit // 8
        short = [token for token in hurry if late and token in choice]
        planned = planned or (
            tokenizer(ending, add_special_tokens=False)["input_ids"] if late and draw.random() < 0.5 else []
        )
        planned = planned if planned and planned[0] in choice else []
        ids.append(int(planned.pop(0) if planned else short[0] if short else draw.choice(choice)))
        state.push(ids[-1])
        assert len(ids) < 4 * limit, tokenizer.decode(ids)


def _accepts(tokenizer, factory, text):
    """Whether every token of a text is allowed and the text is a complete answer."""
    state = factory(tokenizer)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if not state.allowed()[token]:
            return False
        state.push(token)
    return bool(state.allowed()[tokenizer.eos_token_id])


@pytest.mark.parametrize("seed", range(12))
def test_random_answers_fit_the_schema(tokenizer, seed):
    value = json.loads(_walk(tokenizer, json_schema_constraint(tokenizer, PERSON), seed))
    jsonschema.validate(value, PERSON)


@pytest.mark.parametrize("seed", range(6))
def test_random_answers_are_json_objects(tokenizer, seed):
    assert isinstance(json.loads(_walk(tokenizer, json_object_constraint(tokenizer), seed)), dict)


def _schemas():
    texts = st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6))
    whole = st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-50, 50),
        st.integers(0, 90),
    )
    fixed = st.lists(
        st.one_of(st.text(max_size=4), st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=3
    )
    simple = st.one_of(texts, whole, fixed.map(lambda values: {"enum": values}), st.just({"type": ["boolean", "null"]}))

    def nested(inner):
        names = st.lists(st.text('abcé "', min_size=1, max_size=3), unique=True, max_size=3)
        objects = st.tuples(names, st.lists(inner, min_size=3, max_size=3), st.integers(0, 3)).map(
            lambda drawn: {
                "type": "object",
                "properties": dict(zip(drawn[0], drawn[1], strict=False)),
                "required": drawn[0][: drawn[2]],
                "additionalProperties": False,
            }
        )
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
        )
        return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda any_of: {"anyOf": any_of}))

    return st.recursive(simple, nested, max_leaves=5)


@settings(max_examples=examples(60), deadline=None)
@given(schema=_schemas(), seed=st.integers(0, 10**6))
def test_answers_to_any_schema_parse_and_validate(tokenizer, schema, seed):
    text = _walk(tokenizer, json_schema_constraint(tokenizer, schema), seed)
    jsonschema.validate(json.loads(text, strict=True), schema)


@settings(max_examples=examples(60), deadline=None)
@given(name=st.text(st.characters(exclude_categories=["C"]), max_size=12), age=st.integers(0, 120))
def test_values_that_fit_are_accepted(tokenizer, name, age):
    value = {"name": name, "age": age, "tags": ["b"], "home": {"x": age / 7}}
    factory = json_schema_constraint(tokenizer, PERSON)
    assert _accepts(tokenizer, factory, json.dumps(value, ensure_ascii=False))
    assert _accepts(tokenizer, factory, json.dumps(value, ensure_ascii=False, indent=4))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"name": "Ada", "age": 121, "home": null}',
        '{"name": 1',
        "[]",
        "Sure: {",
        '{"name": "A',
    ],
)
def test_values_that_do_not_fit_are_refused(tokenizer, text):
    assert not _accepts(tokenizer, json_schema_constraint(tokenizer, PERSON), text)


@pytest.mark.parametrize("text", ["{\n\n", "{  ", "{\n" + 33 * " "])
def test_unbounded_whitespace_is_not_allowed(tokenizer, text):
    state = json_schema_constraint(tokenizer, PERSON)(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["{" if char == "{" else "Ċ" if char == "\n" else "Ġ" for char in text])
    for token in ids[:-1]:
        assert state.allowed()[token]
        state.push(token)
    assert not state.allowed()[ids[-1]]


def choice_constraint(tokenizer, choices, **options):
    """One of the choices: the smallest grammar."""
    rules = "body: " + " | ".join(map(grammar._quoted, choices))
    return grammar._compiler(tokenizer, options).factory(rules, None, "choice")


def test_answers_are_one_of_the_choices(tokenizer):
    choices = ["yes", "yes, but", 'no "\n', "é"]
    factory = choice_constraint(tokenizer, choices)
    assert {_walk(tokenizer, factory, seed) for seed in range(60)} == set(choices)


def test_the_end_of_text_is_allowed_only_when_the_answer_is_complete(tokenizer):
    state = choice_constraint(tokenizer, ["ab", "abc"])(tokenizer)
    eos = tokenizer.eos_token_id
    for char, complete, finished in (("a", False, False), ("b", True, False), ("c", True, True)):
        state.push(tokenizer.convert_tokens_to_ids(char))
        assert (bool(state.allowed()[eos]), state.finished) == (complete, finished)
    assert np.flatnonzero(state.allowed()).tolist() == [eos]
    state.push(eos)
    assert state.finished


def test_masks_have_the_size_of_the_models_vocabulary_and_use_its_eos_ids(tokenizer):
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")}
    factory = choice_constraint(tokenizer, ["a"], vocab_size=len(tokenizer) + 77, eos_ids=ends)
    state = factory(tokenizer)
    assert state.allowed().shape == (len(tokenizer) + 77,)
    assert state.allowed().dtype == np.bool_
    state.push(tokenizer.convert_tokens_to_ids("a"))
    assert set(np.flatnonzero(state.allowed())) == ends


def test_states_are_independent(tokenizer):
    factory = choice_constraint(tokenizer, ["ab", "cd"])
    first, second = factory(tokenizer), factory(tokenizer)
    first.push(tokenizer.convert_tokens_to_ids("a"))
    assert second.allowed()[tokenizer.convert_tokens_to_ids("c")]
    assert not first.allowed()[tokenizer.convert_tokens_to_ids("c")]


def test_a_token_that_is_not_allowed_is_an_error(tokenizer):
    state = choice_constraint(tokenizer, ["ab"])(tokenizer)
    with pytest.raises(EngineError, match="cannot be parsed with the grammar"):
        state.push(tokenizer.convert_tokens_to_ids("z"))


def test_a_grammar_is_compiled_once(tokenizer, monkeypatch):
    schema = {"const": "compiled once"}
    json_schema_constraint(tokenizer, schema)
    monkeypatch.setattr(grammar._Compiler, "_compile", None)
    assert _accepts(tokenizer, json_schema_constraint(tokenizer, schema), '"compiled once"')


@pytest.mark.parametrize("marker", ["</think>", "<|user|>"])
def test_the_grammar_applies_after_the_reasoning(tokenizer, marker):
    factory = json_schema_constraint(tokenizer, {"const": 1}, after=marker)
    for text in (f"One {{ is </b> one.\n{marker}\n\n1", f"{marker}1"):
        assert _accepts(tokenizer, factory, text)
    for text in ("1", "One", f"One{marker}", f"One{marker}2"):
        assert not _accepts(tokenizer, factory, text)


@pytest.mark.parametrize("special", [False, True])
def test_the_reasoning_may_contain_markers_that_are_tokens(special):
    tokenizer = bpe_tokenizer(["so it is"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"], special_tokens=special)
    factory = json_schema_constraint(tokenizer, {"const": 1}, after="</think>")
    assert _accepts(tokenizer, factory, "<think>\nso <tool_call> it\n</think>\n\n1")
    assert not _accepts(tokenizer, factory, "<think>\nso <tool_call> it\n</think>\n\n2")
    assert not _accepts(tokenizer, factory, "so it is")


@pytest.mark.parametrize("name", FORMATS + TAGGED)
@pytest.mark.parametrize("markers", some_quick(["text", "tokens", "special"], "tokens"))
def test_required_calls_parse_and_validate(name, markers):
    parser = parser_for(None, name)
    tokenizer = bpe_tokenizer(["get_weather now"])
    long_markers = [marker for marker in parser.markers if len(marker) > 1] + TAG_TOKENS.get(name, [])
    if markers == "tokens":
        tokenizer.add_tokens(long_markers)
    if markers == "special":
        tokenizer.add_special_tokens({"additional_special_tokens": long_markers})
    named = {"type": "function", "function": {"name": "get_weather"}}
    tools = [{"function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for choice, parallel in (("required", True), (named, False)):
        factory = tool_call_constraint(tokenizer, parser, tools, choice, parallel=parallel)
        for seed in range(3):
            message = parser.parse(_walk(tokenizer, factory, seed, ending=parser.shape.argument_after), tools, choice)
            assert message.tool_calls
            assert (message.content, message.malformed) == (None, 0)
            assert parallel or len(message.tool_calls) == 1
            for call in message.tool_calls:
                schema = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == call.name)["parameters"]
                jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("name", TAGGED)
def test_calls_as_a_model_writes_them_are_accepted(tokenizer, name):
    parser = parser_for(None, name)
    factory = tool_call_constraint(tokenizer, parser, TOOLS)
    call = ("get_weather", {"city": "a <b> {\nc", "days": 3, "detail": True, "where": [1.5]})
    assert _accepts(tokenizer, factory, WRITERS[name](call))
    assert not _accepts(tokenizer, factory, WRITERS[name](("get_weather", {"city": "x", "days": "many"})))
    assert not _accepts(tokenizer, factory, WRITERS[name](("get_weather", {"days": 3})))
    assert not _accepts(tokenizer, factory, WRITERS[name](("rocket", {"city": "x"})))


def test_unsupported_parameter_schemas_are_refused_only_for_strict_tools(tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    parser = parser_for(None, "json")
    tool_call_constraint(tokenizer, parser, [{"name": "f", "parameters": schema}])
    with pytest.raises(UsageError, match=r"tools: parameters of f: .*uniqueItems"):
        tool_call_constraint(tokenizer, parser, [{"name": "f", "parameters": schema, "strict": True}])


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("strict", [False, True])
def test_text_arguments_are_among_the_values_of_their_enum(tokenizer, name, strict):
    units = {"type": "string", "enum": ["celsius", "kelvin"]}
    schema = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/unit"}, "kind": units},
        "$defs": {"unit": units},
    }
    parser = parser_for(None, name)
    factory = tool_call_constraint(tokenizer, parser, [{"name": "f", "parameters": schema, "strict": strict}])
    assert _accepts(tokenizer, factory, WRITERS[name](("f", {"unit": "kelvin", "kind": "celsius"})))
    for wrong in ({"unit": "rankine"}, {"kind": "rankine"}, {"kind": "kelvins"}):
        assert not _accepts(tokenizer, factory, WRITERS[name](("f", wrong)))


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "maxLength": 3}, "maxLength"),
        ({"type": ["string", "null"], "pattern": "a+"}, "pattern"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, "minimum"),
        ({"type": ["string", "null"], "enum": ["a", None]}, "enum"),
    ],
)
def test_limits_of_text_arguments_are_refused_only_for_strict_tools(tokenizer, name, schema, keyword):
    parser = parser_for(None, name)
    tool = {"name": "f", "parameters": {"properties": {"a": schema}}}
    tool_call_constraint(tokenizer, parser, [tool])
    with pytest.raises(
        UsageError, match=f"tools: parameters of f: the argument a is .* cannot be enforced: {keyword};"
    ):
        tool_call_constraint(tokenizer, parser, [{**tool, "strict": True}])
    optional = {"anyOf": [{"type": "string", "description": "x"}, {"type": "null"}], "default": None}
    tool_call_constraint(
        tokenizer, parser, [{"name": "f", "parameters": {"properties": {"a": optional}}, "strict": True}]
    )


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("definitions", ["$defs", "definitions"])
def test_arguments_may_refer_to_definitions(tokenizer, name, definitions):
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    reference = {"$ref": f"#/{definitions}/point"}
    properties = {"at": reference, "path": {"type": "array", "items": reference}}
    tool = {"name": "f", "parameters": {"properties": properties, definitions: {"point": point}}, "strict": True}
    factory = tool_call_constraint(tokenizer, parser_for(None, name), [tool])
    assert _accepts(tokenizer, factory, WRITERS[name](("f", {"at": {"x": 1}, "path": [{"x": 2}]})))
    for wrong in ({"at": {"y": 1}}, {"at": "here"}, {"path": [{"x": "a"}]}):
        assert not _accepts(tokenizer, factory, WRITERS[name](("f", wrong)))


@pytest.mark.parametrize("name", ["json", *TAGGED])
@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": {"type": 5}}}, {"properties": {"a": {"anyOf": 5}}}, {"properties": 5}, {"required": 5}],
)
def test_invalid_parameter_schemas_are_refused(tokenizer, name, schema):
    with pytest.raises(UsageError, match="tools: parameters of f: "):
        tool_call_constraint(tokenizer, parser_for(None, name), [{"name": "f", "parameters": schema}])


def test_calls_that_cannot_be_enforced_are_refused(tokenizer):
    with pytest.raises(UsageError, match="the gemma4 format does not support forced calls"):
        tool_call_constraint(tokenizer, parser_for(None, "gemma4"), TOOLS)
    with pytest.raises(UsageError, match="there are no tools"):
        tool_call_constraint(tokenizer, parser_for(None, "json"), [])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "#/$defs/nowhere"}, "does not exist"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "color"}, "Unknown format: color"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"minimum": "x"}, "minimum"),
        (["object"], "a JSON schema must be an object"),
        ({"const": {1, 2}}, "not JSON serializable"),
        (False, "json_schema"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused_with_the_reason(tokenizer, schema, reason):
    with pytest.raises(UsageError, match=reason):
        json_schema_constraint(tokenizer, schema)


def test_a_grammar_without_an_eos_token_is_refused(tokenizer):
    with pytest.raises(UsageError, match="requires an EOS token"):
        json_object_constraint(tokenizer, eos_ids=[])


def test_a_missing_package_error_names_the_remedy(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=re.escape(install_command("serve"))):
        json_object_constraint(tokenizer)


def test_the_module_loads_without_torch_and_without_the_package():
    code = "import sys; import areno.text.grammar; print([m for m in ('torch', 'llguidance') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_tokens_are_forced_if_only_one_text_can_follow(tokenizer):
    state = choice_constraint(tokenizer, ["color red", "color blue"])(tokenizer)
    for text, forced in [("co", True), ("lor", True), (" ", True), ("b", False), ("lue", True)]:
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            assert state.forces(token) == forced, text
            state.push(token)
