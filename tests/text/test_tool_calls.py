"""Tool calls in every format: what is a call, what stays text, and which format a model writes."""

import json
import re

import pytest

from areno.errors import UsageError
from areno.text.tool_calls import (
    ContentDelta,
    ToolCallParser,
    list_tool_call_parsers,
    parser_for,
    register_tool_call_parser,
)
from areno.text.tool_calls.schema import typed_arguments
from tests.text.tool_call_cases import NOW, OSLO, ROME, TOOLS, WRITERS, bare_json, hermes

FORMATS = sorted(WRITERS)


def _calls(message):
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", [(ROME,), (ROME, OSLO, NOW), (NOW,)])
def test_calls_are_read(name, calls):
    message = parser_for(None, name).parse(WRITERS[name](*calls), TOOLS)
    assert _calls(message) == list(calls)
    assert message.content is None
    assert message.malformed == 0
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call.id) for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(calls)


@pytest.mark.parametrize("name", FORMATS)
def test_text_before_calls_is_the_content(name):
    message = parser_for(None, name).parse("Let me look.\n\n" + WRITERS[name](ROME, OSLO) + "\n", TOOLS)
    assert message.content == "Let me look."
    assert _calls(message) == [ROME, OSLO]


@pytest.mark.parametrize("name", FORMATS)
def test_text_after_calls_is_content_without_markers(name):
    message = parser_for(None, name).parse(WRITERS[name](ROME, OSLO) + "\nDone.", TOOLS)
    assert message.content == "\nDone."
    assert _calls(message) == [ROME, OSLO]


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_unchanged(name):
    text = "  If a < b then f(x) = {1, 2} and [3, 4]; `a[0]` is <b>bold</b>.\n"
    message = parser_for(None, name).parse(text, TOOLS)
    assert message.content == text
    assert message.tool_calls == []
    assert message.malformed == 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_an_unknown_tool_stays_text_and_is_counted(name):
    text = WRITERS[name](("launch_rocket", {"city": "Rome"}))
    message = parser_for(None, name).parse(text, TOOLS)
    assert message.content == text
    assert message.tool_calls == []
    assert message.malformed == 1


@pytest.mark.parametrize("name", FORMATS)
def test_text_with_only_calls_of_unknown_tools_is_unchanged(name):
    text = WRITERS[name](("launch_rocket", {"city": "Rome"}), ("land_rocket", {}))
    message = parser_for(None, name).parse(text, TOOLS)
    assert (message.content, message.tool_calls, message.malformed) == (text, [], 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_call_does_not_spoil_the_good_one_after_it(name):
    bad, good = WRITERS[name](("launch_rocket", {"city": "Rome"})), WRITERS[name](OSLO)
    message = parser_for(None, name).parse(f"{bad}\n{good}", TOOLS)
    assert _calls(message) == [OSLO]
    assert "launch_rocket" in message.content
    assert message.malformed == 1


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_or_with_choice_none_nothing_is_parsed(name):
    text = WRITERS[name](ROME)
    for tools, choice in ((TOOLS, "none"), ([], "auto"), (None, "auto")):
        message = parser_for(None, name).parse(text, tools, choice)
        assert (message.content, message.tool_calls, message.malformed) == (text, [], 0)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_named_tool_may_be_called(name):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    message = parser_for(None, name).parse(WRITERS[name](NOW) + "\n" + WRITERS[name](ROME), TOOLS, choice)
    assert _calls(message) == [ROME]
    assert message.malformed == 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_call_stays_text(name):
    whole = WRITERS[name](ROME)
    cut = whole[: whole.index("Rome") + 2]
    message = parser_for(None, name).parse("Hm. " + cut, TOOLS)
    assert message.content == "Hm. " + cut
    assert message.tool_calls == []
    assert message.malformed == 1


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_may_contain_any_text(name):
    city = "São \"Paulo\" \\ </tool_call> {[ 'x' ; `"
    if name in ("json", "llama3"):
        city += " <tool_call>"
    message = parser_for(None, name).parse(WRITERS[name](("get_weather", {"city": city})), TOOLS)
    assert _calls(message) == [("get_weather", {"city": city})]


@pytest.mark.parametrize("name", FORMATS)
def test_nested_values_are_parsed(name):
    call = ("get_weather", {"city": "Rome", "where": [1.5, -2]})
    assert _calls(parser_for(None, name).parse(WRITERS[name](call), TOOLS)) == [call]


@pytest.mark.parametrize(
    "babble", ["[", "{", '{"a":', "<tool_call>", "[TOOL_CALLS]", "[f(", "<function=", '"', "```json", "[TOOL_CALLS][]"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_babble_stays_text(name, babble):
    text = babble * 300
    message = parser_for(None, name).parse(text, TOOLS)
    assert message.content == text


def test_arguments_are_compact_json_of_what_the_model_wrote():
    text = '<tool_call>{"name": "get_weather", "arguments": {"city":  "Zürich",\n "days": 1.0}}</tool_call>'
    call = parser_for(None, "hermes").parse(text, TOOLS).tool_calls[0]
    assert call.arguments == '{"city":"Zürich","days":1.0}'


def test_a_lone_surrogate_can_still_be_encoded():
    call = (
        parser_for(None, "json").parse(r'{"name": "get_weather", "arguments": {"city": "\ud83d"}}', TOOLS).tool_calls[0]
    )
    assert json.loads(call.arguments.encode()) == {"city": "\ud83d"}


@pytest.mark.parametrize(
    "arguments", ["[1]", "5", '"no json"', '{"city": NaN}', '{"city": 1e999}', "{'city': 1}", '{"city": nope}']
)
def test_arguments_that_are_not_a_json_object_make_the_call_malformed(arguments):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    message = parser_for(None, "qwen").parse(text, TOOLS)
    assert (message.content, message.tool_calls, message.malformed) == (text, [], 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"type": "function", "function": {"name": "now", "arguments": {}}}', [NOW]),
        (json.dumps({"tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}), [NOW]),
        (f"[{bare_json(ROME)}, {bare_json(NOW)}]", [ROME, NOW]),
        (f"```json\n{bare_json(ROME)}\n```", [ROME]),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 3}"}', [ROME]),
    ],
)
def test_the_usual_variants_of_bare_json_are_calls(text, expected):
    message = parser_for(None, "json").parse(text, TOOLS)
    assert _calls(message) == expected
    assert message.content is None


@pytest.mark.parametrize(
    "text", ['{"city": "Rome"}', "[1, 2]", '{"name": "Ada", "age": 3}', '```json\n{"a": 1}\n```', "[{}]"]
)
def test_json_that_is_not_a_call_is_text_and_not_counted(text):
    message = parser_for(None, "json").parse(text, TOOLS)
    assert (message.content, message.tool_calls, message.malformed) == (text, [], 0)


def test_a_qwen_parser_reads_json_and_tags():
    text = hermes(ROME) + "\n" + WRITERS["qwen3_coder"](OSLO)
    message = parser_for(None, "qwen").parse(text, TOOLS)
    assert _calls(message) == [ROME, OSLO]
    assert message.content is None


@pytest.mark.parametrize("name", ["minicpm", "minicpmv46"])
def test_minicpm_reads_the_tags_of_qwen_too(name):
    tagged = WRITERS["minicpm"](OSLO)
    text = WRITERS["qwen3_coder"](ROME) + tagged + hermes(NOW) + f"<tool_call>\n{tagged}</tool_call>"
    message = parser_for(None, name).parse(text, TOOLS)
    assert _calls(message) == [ROME, OSLO, NOW, OSLO]
    assert (message.content, message.malformed) == (None, 0)


@pytest.mark.parametrize("text", ["[f(x) for x in y]", "[f(a=1) if x else now()]", '[now(a=f"{x}")]', "[now(a=1), 2]"])
def test_python_that_is_not_a_list_of_calls_stays_text(text):
    message = parser_for(None, "pythonic").parse(text, [{"name": "f"}])
    assert (message.tool_calls, message.content) == ([], text)
    assert message.malformed


@pytest.mark.parametrize(
    ("prose", "malformed"),
    [
        ("As in [note (it's so)] then", 0),
        ("The [dogs (the dogs' food)] and", 0),
        ("[now(a=it's)] and", 1),
    ],
)
def test_an_apostrophe_in_prose_does_not_hide_the_python_calls_after_it(prose, malformed):
    stream = parser_for(None, "pythonic").stream(TOOLS)
    assert stream.push(prose) == [ContentDelta(prose)]
    message = parser_for(None, "pythonic").parse(f"{prose} [now(a=r'it\\'s'), now(b=u\"x\")]", TOOLS)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"a": r"it\'s"}, {"b": "x"}]
    assert (message.content, message.malformed) == (prose, malformed)


def test_python_calls_next_to_non_ascii_text_keep_their_own_source():
    message = parser_for(None, "pythonic").parse("[now(),\r\n nosuch(a='é🙂',\n b=2)]", TOOLS)
    assert _calls(message) == [NOW]
    assert message.content == "nosuch(a='é🙂',\n b=2)"


def test_an_unclosed_call_ends_where_the_next_begins():
    text = f"<tool_call>{bare_json(ROME)}\n<tool_call>{bare_json(OSLO)}"
    assert _calls(parser_for(None, "hermes").parse(text, TOOLS)) == [ROME, OSLO]


def test_a_broken_string_loses_only_one_call():
    text = '<tool_call>{"name": "now", "arguments": {"a": "oops}}</tool_call> and ' + hermes(ROME)
    message = parser_for(None, "hermes").parse(text, TOOLS)
    assert _calls(message) == [ROME]
    assert message.malformed == 1
    assert message.content == '<tool_call>{"name": "now", "arguments": {"a": "oops}}</tool_call> and'


def test_mistral_call_ids_are_ignored():
    text = '[TOOL_CALLS]get_weather[CALL_ID]9x8y7z6w5[ARGS]{"city": "Rome", "days": 3}'
    assert _calls(parser_for(None, "mistral").parse(text, TOOLS)) == [ROME]


@pytest.mark.parametrize("name", ["now.x(city='a')", "now('a')", "now(**{'a': 1})", "now(a=open('f'))", "now(a={1})"])
def test_python_that_is_not_a_plain_call_is_neither_executed_nor_parsed_as_one(name):
    message = parser_for(None, "pythonic").parse(f"[{name}]", TOOLS)
    assert (message.tool_calls, message.malformed) == ([], 1)


def test_python_calls_support_json_constants_and_dotted_names():
    tools = [{"name": "web.search", "parameters": {}}]
    message = parser_for(None, "pythonic").parse("[web.search(a=true, b=None, c=[null, -1], d={'k': 'v'})]", tools)
    assert _calls(message) == [("web.search", {"a": True, "b": None, "c": [None, -1], "d": {"k": "v"}})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "integer"}, "1_0", "1_0"),
        ({"type": "integer"}, "+7", 7),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "[-1e999]", "[-1e999]"),
        ({"$ref": "#/$defs/size"}, "7", 7),
        ({"$ref": "#/$defs/code"}, "7", "7"),
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/tree"}, "[7]", [7]),
        ({"$ref": "#/$defs/nowhere"}, "[7]", [7]),
        ({"type": 5}, "[1]", [1]),
        ({"type": ["integer", 5]}, "3", 3),
        ({"anyOf": 5}, "[1]", [1]),
        ({"enum": 5}, "[1]", [1]),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "[1]", [1]),
        ({}, "plain words", "plain words"),
        (None, "NaN", "NaN"),
    ],
)
def test_values_written_as_text_take_the_type_of_the_schema(schema, text, value):
    definitions = {
        **{"size": {"type": "integer"}, "code": {"enum": ["7", "8"]}, "place": {"type": "object"}},
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array"}]},
    }
    properties = {} if schema is None else {"x": schema}
    typed = typed_arguments({"x": text}, {"type": "object", "properties": properties, "$defs": definitions})["x"]
    assert typed == value
    assert type(typed) is type(value)


def test_values_keep_their_own_line_breaks_and_tags():
    code = "def f():\n    return '</function>'\n"
    text = f"<function=get_weather>\n<parameter=city>\n{code}\n</parameter>\n</function>"
    assert _calls(parser_for(None, "qwen3_coder").parse(text, TOOLS)) == [("get_weather", {"city": code})]


SIGNS = {
    "qwen": "{% for t in tools %}...{% endfor %}<tool_call>{{ tool_call | tojson }}</tool_call>",
    "qwen3_coder": "write <tool_call>\n<function=example>\n<parameter=x>",
    "llama3": "<|start_header_id|>system<|end_header_id|>{{ tools }}",
    "mistral": "{{ '[TOOL_CALLS][' + calls + ']' }}",
    "mistral_args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "gemma4": "<|tool_call>call:{{ name }}",
    "deepseek": "{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name }}",
    "deepseek_v31": "{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "glm": "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>",
    "kimi": "<|tool_calls_section_begin|>",
    "minimax": "<minimax:tool_call>",
    "minicpm": '<function name="x">',
    "pythonic": "reply with [func_name1(params_name1=params_value1), func_name2(params)]",
    "harmony": "<|start|>assistant<|channel|>analysis",
    "json": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", sorted(SIGNS))
def test_the_format_is_detected_from_the_chat_template(make_tokenizer, name):
    assert parser_for(make_tokenizer(chat_template=SIGNS[name])).name == name


def test_the_template_for_tools_is_checked_first(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "<tool_call>", "tool_use": "[TOOL_CALLS]"}
    assert parser_for(tokenizer).name == "mistral"


def test_the_format_is_detected_from_added_tokens_if_not_from_the_template(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    assert parser_for(tokenizer).name == "json"
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    assert parser_for(tokenizer).name == "qwen"


def test_names_have_aliases_and_unknown_ones_are_refused():
    assert parser_for(None, "qwen3-coder").name == "qwen3_coder"
    assert parser_for(None, "llama").name == "llama3"
    others = {
        "qwen25": "qwen",
        "deepseekv31": "deepseek_v31",
        "llama4": "pythonic",
        "gpt-oss": "harmony",
        "openai": "harmony",
    }
    assert {name: parser_for(None, name).name for name in others} == others
    assert all(parser_for(None, name) for name in list_tool_call_parsers())
    with pytest.raises(UsageError, match="--tool-call-parser nosuch is unknown; use one of: auto, bailing"):
        parser_for(None, "nosuch")


def test_a_custom_format_can_be_registered(monkeypatch):
    from areno.text.tool_calls import registry

    monkeypatch.setattr(registry, "_PARSERS", dict(registry._PARSERS))
    mine = ToolCallParser("mine", parser_for(None, "hermes").formats)
    register_tool_call_parser("mine", mine)
    assert _calls(parser_for(None, "mine").parse(hermes(ROME), TOOLS)) == [ROME]
    for taken in ("mine", "qwen3"):
        with pytest.raises(UsageError, match="already exists"):
            register_tool_call_parser(taken, mine)
    with pytest.raises(UsageError, match="'auto' is reserved"):
        register_tool_call_parser("auto", mine, replace=True)
    register_tool_call_parser("mine", parser_for(None, "json"), replace=True)
    assert parser_for(None, "mine").name == "json"


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{"type": "function"}], "auto", r"tools\[0\].*is not a function"),
        ([{"name": ""}], "auto", r"tools\[0\]"),
        (TOOLS, "sometimes", "tool_choice: 'sometimes' is unknown"),
        (TOOLS, {"function": {"name": "nosuch"}}, "no tool 'nosuch'; the tools are get_weather, now"),
        (TOOLS, {"function": {}}, "tool_choice: .* is not a function"),
    ],
)
def test_invalid_tools_and_choices_are_usage_errors(tools, choice, message):
    with pytest.raises(UsageError, match=message):
        parser_for(None, "json").parse("", tools, choice)


def test_flat_tools_are_accepted():
    flat = [tool["function"] for tool in TOOLS]
    assert _calls(parser_for(None, "qwen").parse(hermes(ROME), flat)) == [ROME]
