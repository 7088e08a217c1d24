"""A message streamed in any pieces gives the same result as the whole, and text outside of calls is emitted at once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.text.tool_calls import ContentDelta, ToolCallDelta, parser_for
from tests.support.examples import examples
from tests.text.tool_call_cases import NOW, OSLO, ROME, TOOLS, WRITERS, hermes

FORMATS = sorted(WRITERS)
UNKNOWN = ("launch_rocket", {"city": "Rome"})


def _fragments(name):
    """Whole calls, slices of calls, markers, and prose that resembles them."""
    writer = WRITERS[name]
    whole = [writer(ROME), writer(OSLO, NOW), writer(UNKNOWN)]
    cut = st.tuples(st.sampled_from(whole), st.integers(0, 200), st.integers(0, 200)).map(
        lambda drawn: drawn[0][min(drawn[1:]) : max(drawn[1:])]
    )
    markers = st.sampled_from(parser_for(None, name).markers)
    looks = [
        "</tool_call>",
        "<|call|>",
        '{"name": "now"',
        ', "arguments": {}}',
        "a < b",
        "[f(",
        "call",
        "```json",
        "é🙂",
    ]
    prose = st.sampled_from(["Hello", "\n\n", "</", *" {}[]\"'\\<>;(=:", *looks])
    return st.lists(st.one_of(st.sampled_from(whole), cut, markers, prose, st.text(max_size=3)), max_size=8).map(
        "".join
    )


def _collected(stream, pieces):
    content, calls = "", []
    for piece in pieces:
        for delta in stream.push(piece):
            content, calls = _add(delta, content, calls)
    for delta in stream.finish():
        content, calls = _add(delta, content, calls)
    return content, calls, stream.malformed


def _add(delta, content, calls):
    if isinstance(delta, ContentDelta):
        assert delta.text
        return content + delta.text, calls
    assert isinstance(delta, ToolCallDelta)
    assert delta.index == len(calls)
    return content, [*calls, (delta.name, delta.arguments_piece)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_streaming_in_any_pieces_gives_the_same_result_as_the_whole_text(name, data):
    text = data.draw(_fragments(name))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    parser = parser_for(None, name)
    whole = parser.parse(text, TOOLS)
    expected = (whole.content or "", [(call.name, call.arguments) for call in whole.tool_calls], whole.malformed)
    assert _collected(parser.stream(TOOLS), pieces) == expected
    assert _collected(parser.stream(TOOLS), text) == expected


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_text_without_a_valid_call_is_kept_completely(name, data):
    text = data.draw(_fragments(name))
    message = parser_for(None, name).parse(text, TOOLS)
    if not message.tool_calls:
        assert message.content == text


@pytest.mark.parametrize("name", FORMATS)
def test_prose_is_streamed_immediately(name):
    stream = parser_for(None, name).stream(TOOLS)
    assert stream.push("Hello, ") == [ContentDelta("Hello,")]
    assert stream.push("world") == [ContentDelta(" world")]
    assert stream.push(".") == [ContentDelta(".")]
    assert stream.finish() == []


def test_text_is_held_back_only_while_it_may_become_a_marker():
    stream = parser_for(None, "hermes").stream(TOOLS)
    assert stream.push("a <tool") == [ContentDelta("a")]
    assert stream.push("s>") == [ContentDelta(" <tools>")]
    assert stream.push("<tool_cal") == []
    assert stream.finish() == [ContentDelta("<tool_cal")]


def test_a_call_is_emitted_as_soon_as_it_is_complete():
    stream = parser_for(None, "hermes").stream(TOOLS)
    text = hermes(ROME, NOW)
    first_end = text.index("</tool_call>") + len("</tool_call>")
    assert stream.push(text[: first_end - 1]) == []
    (delta,) = stream.push(text[first_end - 1 : first_end])
    assert (delta.index, delta.name, delta.arguments_piece) == (0, "get_weather", '{"city":"Rome","days":3}')
    (delta,) = stream.push(text[first_end:])
    assert (delta.index, delta.name, delta.arguments_piece) == (1, "now", "{}")
