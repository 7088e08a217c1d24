"""Messages of OpenAI clients rendered by chat templates: tools, calls, tool results, content in parts."""

import json

import pytest

from areno.errors import UsageError
from areno.text.chat import encode_generation_prompt, render_generation_prompt
from areno.text.tool_calls import parser_for
from tests.text.tool_call_cases import TOOLS

HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Rome?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 3}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
# The tool sections of templates of several model families, reduced to how they treat arguments.
OBJECTS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
PAIRS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}|{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
)
CALLS = "{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}{{% endfor %}}"
ADDED = CALLS.format("{{ '!' + c.function.arguments + '!' }}")
JOINED = CALLS.format("{{ '!' ~ c.function.arguments ~ '!' }}")
TYPED = CALLS.format("{{ 'text' if c.function.arguments is string else 'object' }}")


def _render(make_tokenizer, template, messages=HISTORY, **options):
    return render_generation_prompt(make_tokenizer(chat_template=template), messages, **options).text


def test_tools_calls_and_results_reach_the_template(make_tokenizer):
    text = _render(make_tokenizer, OBJECTS, tools=TOOLS)
    assert [json.loads(line) for line in text.splitlines()[:2]] == TOOLS
    assert "<|im_start|>user\nHow is Rome?<|im_start|>assistant\n<tool_call>get_weather " in text
    assert '<tool_call>get_weather {"city": "Rome", "days": 3}' in text
    assert text.endswith("<|im_start|>tool\nsunny")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PAIRS, "get_weather|city=Rome|days=3"),
        (ADDED, '!{"city": "Rome", "days": 3}!'),
        (JOINED, '!{"city": "Rome", "days": 3}!'),
        (TYPED, "object"),
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_fit_templates_that_expect_objects_and_those_that_expect_text(
    make_tokenizer, template, expected, as_text
):
    arguments = {"city": "Rome", "days": 3}
    call = {"function": {"name": "get_weather", "arguments": json.dumps(arguments) if as_text else arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert _render(make_tokenizer, template, messages) == expected


def test_arguments_that_are_not_a_json_object_stay_text(make_tokenizer):
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "{oops"}}]}]
    assert _render(make_tokenizer, JOINED, messages) == "!{oops!"


def test_missing_arguments_are_an_empty_object(make_tokenizer):
    for function in ({"name": "now"}, {"name": "now", "arguments": ""}, {"name": "now", "arguments": None}):
        assert (
            _render(make_tokenizer, JOINED, [{"role": "assistant", "tool_calls": [{"function": function}]}]) == "!{}!"
        )


def test_flat_tools_are_wrapped(make_tokenizer):
    assert _render(make_tokenizer, OBJECTS, tools=[tool["function"] for tool in TOOLS]) == _render(
        make_tokenizer, OBJECTS, tools=TOOLS
    )


def test_a_template_without_a_place_for_tools_gets_them_as_text(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    text = render_generation_prompt(tokenizer, "How is Rome?", tools=TOOLS).text
    system = text[: text.index("<|im_end|>")]
    assert system.startswith("<|im_start|>system\n")
    assert all(json.dumps(tool["function"]) in system for tool in TOOLS)
    assert "<|im_start|>user\nHow is Rome?<|im_end|>" in text
    own = render_generation_prompt(
        tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}], tools=TOOLS
    ).text
    assert own.startswith("<|im_start|>system\nBe brief.\n\n")
    assert own.count("<|im_start|>system") == 1


def test_calls_are_rendered_as_text_if_the_template_does_not_support_them(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    text = render_generation_prompt(tokenizer, HISTORY, tools=TOOLS).text
    turn = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    calls = parser_for(tokenizer).parse(turn, TOOLS).tool_calls  # the model sees calls in the format that is parsed
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", {"city": "Rome", "days": 3})]
    assert "<|im_start|>tool\nsunny<|im_end|>" in text


def test_without_a_template_messages_become_lines(make_tokenizer):
    rendered = render_generation_prompt(make_tokenizer(), HISTORY)
    assert not rendered.templated
    assert rendered.text == (
        'user: How is Rome?\nassistant: {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n'
        "tool: sunny\nassistant:"
    )
    assert "get_weather" in render_generation_prompt(make_tokenizer(), "Hi", tools=TOOLS).text


def test_the_developer_role_becomes_system_if_the_template_does_not_know_it(make_tokenizer, chatml):
    messages = [{"role": "developer", "content": "Be brief."}]
    assert _render(make_tokenizer, chatml, messages).startswith("<|im_start|>system\nBe brief.")
    known = "{% for m in messages %}{% if m.role == 'developer' %}D:{{ m.content }}{% endif %}{% endfor %}"
    assert _render(make_tokenizer, known, messages) == "D:Be brief."


def test_template_variables_are_passed_on(make_tokenizer, chatml):
    def render(**options):
        return _render(make_tokenizer, chatml, [{"role": "user", "content": "?"}], **options)

    assert render(chat_template_kwargs={"enable_thinking": False}).endswith("<think></think>")
    assert not render(disable_thinking=True, chat_template_kwargs={"enable_thinking": True}).endswith("</think>")
    with pytest.raises(UsageError, match="chat_template_kwargs: add_generation_prompt is reserved"):
        render(chat_template_kwargs={"add_generation_prompt": False})


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\]\.content\[0\]: parts of type 'image_url'",
        ),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": [3]}], r"messages\[1\]\.content\[0\]: .*'int'"),
        ([{"content": "a"}], r"messages\[0\]: .* is not a message"),
        (
            [{"role": "user", "content": {"type": "text", "text": "a"}}],
            r"messages\[0\]\.content: .* is neither text nor a list",
        ),
        (
            [{"role": "assistant", "content": 7, "tool_calls": HISTORY[1]["tool_calls"]}],
            r"messages\[0\]\.content: 7 is neither",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
            r"messages\[0\]\.tool_calls\[0\]: .* is not a tool call",
        ),
    ],
)
def test_errors_name_invalid_messages(make_tokenizer, chatml, messages, error):
    with pytest.raises(UsageError, match=error):
        _render(make_tokenizer, chatml, messages)


def test_the_callers_messages_are_not_changed(make_tokenizer, chatml):
    before = json.dumps(HISTORY)
    for template in (chatml, OBJECTS):
        _render(make_tokenizer, template, tools=TOOLS)
    assert json.dumps(HISTORY) == before


def test_parts_and_plain_text_give_the_same_tokens(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]}]
    assert encode_generation_prompt(tokenizer, parts) == encode_generation_prompt(tokenizer, "the fox")
