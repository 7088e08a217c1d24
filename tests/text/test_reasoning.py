"""Separating reasoning from content: every format, whole and streamed."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.errors import UsageError
from areno.text.reasoning import ReasoningDelta, list_reasoning_parsers, reasoning_parser_for
from areno.text.tool_calls import ContentDelta, parser_for
from tests.support.examples import examples
from tests.text.tool_call_cases import OSLO, ROME, TOOLS, harmony

MARKERS = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}


@pytest.fixture(scope="module")
def parsers(make_tokenizer):
    tokenizer = make_tokenizer(chat_template="{{ messages[0].content }}")
    return {name: reasoning_parser_for(tokenizer, name) for name in [*MARKERS, "none", "harmony"]}


@pytest.mark.parametrize("name", sorted(MARKERS))
def test_reasoning_at_the_beginning_is_split_off(parsers, name):
    opener, closer = MARKERS[name]
    text = f"\n{opener}\n2 < 3, so\n\nyes.\n{closer}\n\nYes,  it is.\n"
    assert parsers[name].parse(text) == ("2 < 3, so\n\nyes.", "Yes,  it is.\n")


@pytest.mark.parametrize("name", sorted(MARKERS))
def test_the_prompt_may_open_the_reasoning(parsers, name):
    opener, closer = MARKERS[name]
    opened = parsers[name].after_prompt(f"user: what does {opener} mean?\nassistant: {opener}\n")
    assert opened.parse(f"Hm.{closer}It depends.") == ("Hm.", "It depends.")
    assert opened.parse(f"{opener}Hm.{closer}It depends.") == ("Hm.", "It depends.")
    closed = parsers[name].after_prompt(f"assistant: {opener}\n\n{closer}\n\n")
    assert closed.parse("It depends.") == (None, "It depends.")
    asked = parsers[name].after_prompt(f"user: what does {opener} mean?\nassistant:")
    assert asked.parse("It depends.") == (None, "It depends.")


@pytest.mark.parametrize("name", sorted(MARKERS))
def test_truncated_reasoning_is_still_reasoning(parsers, name):
    opener, closer = MARKERS[name]
    assert parsers[name].parse(f"{opener}Let me see") == ("Let me see", "")
    assert parsers[name].parse(f"{opener}Let me {closer[:-1]}") == (f"Let me {closer[:-1]}", "")


def test_empty_reasoning_is_none(parsers):
    assert parsers["think"].parse("<think>\n\n</think>\n\nHi.") == (None, "Hi.")


@pytest.mark.parametrize("name", [*sorted(MARKERS), "none", "harmony"])
@pytest.mark.parametrize("text", ["", "  Hi there.\n", "a <b> c", "[1] is <", "The word <thinks> is none."])
def test_text_without_reasoning_is_unchanged(parsers, name, text):
    assert parsers[name].parse(text) == (None, text)


def test_later_markers_are_text(parsers):
    text = "Say <think>x</think>."
    assert parsers["think"].parse(text) == (None, text)
    assert parsers["think"].parse(f"<think>a</think>{text}") == ("a", text)


def test_a_model_without_reasoning_keeps_its_markers(parsers):
    assert parsers["none"].parse("<think>a</think>b") == (None, "<think>a</think>b")
    assert parsers["none"].markers == ()


def test_harmony_channels(parsers):
    text = (
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>analysis<|message|>Easy.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    assert parsers["harmony"].parse(text) == ("The user asks.\nEasy.", "Four.")


@pytest.mark.parametrize("header", ["<|start|>", "<|start|>assistant<|chan", "<|channel|>commentary to=functions.get"])
def test_a_truncated_harmony_header_is_not_content(parsers, header):
    assert parsers["harmony"].parse(header) == (None, "")
    begin = "<|channel|>analysis<|message|>Hm.<|end|>"
    assert parsers["harmony"].parse(begin + header) == ("Hm.", "")
    long = header + " word" * 60  # not a header: the model forgot the marker that ends it
    assert parsers["harmony"].parse(long) == (None, long)


def test_harmony_calls_reach_the_tool_parser(parsers):
    calls = harmony(ROME) + "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
    text = (
        f'<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant{calls}{{"city": "Oslo", "detail": true}}'
    )
    reasoning, content = parsers["harmony"].parse(text)
    message = parser_for(None, "harmony").parse(content, TOOLS)
    assert reasoning == "Look it up."
    assert [call.arguments for call in message.tool_calls] == [
        '{"city":"Rome","days":3}',
        '{"city":"Oslo","detail":true}',
    ]
    assert [call.name for call in message.tool_calls] == [ROME[0], OSLO[0]]
    assert message.content is None


def _joined(deltas):
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return reasoning or None, "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


@pytest.mark.parametrize("name", [*sorted(MARKERS), "harmony"])
@pytest.mark.parametrize("inside", [False, True])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_streaming_in_any_pieces_gives_the_same_result_as_the_whole_text(parsers, name, inside, data):
    markers = [*parsers[name].markers, *(marker[:-2] for marker in parsers[name].markers)]
    words = ["Hm", " ", "\n\n", "<", "a < b", "final", "analysis", " to=functions.f", "{}", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(markers + words), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = parsers[name].after_prompt(f"assistant {parsers[name].opener}" if inside else "assistant")
    expected = parser.parse(text)
    for edges in ([0, *cuts, len(text)], range(len(text) + 1)):
        stream = parser.stream()
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        assert _joined([delta for piece in pieces for delta in stream.push(piece)] + stream.finish()) == expected


def test_reasoning_and_content_are_streamed_immediately(parsers):
    stream = parsers["think"].stream()
    assert stream.push("<think>\n") == []
    assert stream.push("One") == [ReasoningDelta("One")]
    assert stream.push(" two </thi") == [ReasoningDelta(" two")]
    assert stream.push("nk>\n\n") == []
    assert stream.push("Done ") == [ContentDelta("Done ")]
    assert stream.push("now") == [ContentDelta("now")]
    assert stream.finish() == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if x %}<think>\n\n</think>{% endif %}", "think"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("<|channel>thought", "gemma4"),
        ("<seed:think>", "seed"),
        ("<|START_THINKING|>", "cohere"),
        ("◁think▷", "kimi"),
        ("<|im_start|>", "none"),
    ],
)
def test_the_format_is_detected_from_the_chat_template(make_tokenizer, template, name):
    assert reasoning_parser_for(make_tokenizer(chat_template=template)).name == name


def test_a_template_that_opens_the_reasoning_itself_is_detected(make_tokenizer):
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    parser = reasoning_parser_for(make_tokenizer(chat_template=template))
    assert parser.starts_inside
    assert parser.parse("So.\n</think>\nYes.") == ("So.", "Yes.")


def test_the_format_is_detected_from_added_tokens_if_not_from_the_template(make_tokenizer, chatml):
    plain = make_tokenizer(chat_template="{{ messages }}")
    assert reasoning_parser_for(plain).name == "none"
    plain.add_tokens(["<think>", "</think>"])
    assert reasoning_parser_for(plain).name == "think"


def test_names_have_aliases_and_unknown_ones_are_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    assert reasoning_parser_for(tokenizer, "deepseek-r1").name == "think"
    assert all(reasoning_parser_for(tokenizer, name) for name in list_reasoning_parsers())
    with pytest.raises(UsageError, match="--reasoning-parser nosuch is unknown; use one of: auto, cohere"):
        reasoning_parser_for(tokenizer, "nosuch")
