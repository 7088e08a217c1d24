"""Every parser of model output takes time linear in the text, whatever a model writes and however it is split.

The tests count the characters that parsers look at: parsers get a text that counts what its methods read, and patterns
that count what they match.
"""

import re
import sys

import pytest

from areno.text.reasoning import _PARSERS as REASONING
from areno.text.tool_calls import parser_for
from tests.text.tool_call_cases import ROME, TOOLS, WRITERS

MODULES = [
    sys.modules[f"areno.text.{name}"]
    for name in (
        "reasoning",
        "tool_calls.block_scanner",
        "tool_calls.gemma",
        "tool_calls.qwen",
        "tool_calls.json_calls",
        "tool_calls.json_span",
        "tool_calls.mistral",
        "tool_calls.pythonic",
        "tool_calls.xml_calls",
    )
]


class Steps:
    count = 0


class Watched(str):
    """A text that counts the characters that its methods read; its slices count them too."""

    __slots__ = ()

    def __getitem__(self, key):
        part = Watched(super().__getitem__(key))
        Steps.count += len(part)
        return part

    def __add__(self, other):  # CPython extends a string in place here
        Steps.count += len(other)
        return Watched(super().__add__(other))

    def __radd__(self, other):
        Steps.count += len(self)
        return Watched(other + str(self))

    def find(self, needle, start=0, end=sys.maxsize):
        position = super().find(needle, start, end)
        Steps.count += (position + len(needle) if position >= 0 else min(end, len(self))) - min(start, len(self))
        return position

    def startswith(self, prefix, start=0):
        Steps.count += len(prefix) if isinstance(prefix, str) else sum(map(len, prefix))
        return super().startswith(prefix, start)

    def strip(self, *chars):
        return self._stripped(super().strip(*chars))

    def lstrip(self, *chars):
        return self._stripped(super().lstrip(*chars))

    def rstrip(self, *chars):
        return self._stripped(super().rstrip(*chars))

    def encode(self, *args):
        Steps.count += len(self)
        return super().encode(*args)

    def _stripped(self, rest):
        Steps.count += len(self) - len(rest) + 1
        return Watched(rest)


class WatchedPattern:
    """A pattern that counts the characters that it matched or, without a match, may have looked at."""

    def __init__(self, pattern):
        self._pattern = pattern

    def __getattr__(self, name):
        method = getattr(self._pattern, name)
        if name not in ("match", "fullmatch", "search"):
            return method

        def counted(text, start=0, end=sys.maxsize):
            match = method(text, start, end)
            Steps.count += 1
            if isinstance(text, Watched):
                Steps.count += (match.end() if match else min(end, len(text))) - min(start, len(text))
            return match

        return counted


@pytest.fixture
def watched(monkeypatch):
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, WatchedPattern(value))
            elif isinstance(value, dict) and value and all(isinstance(one, re.Pattern) for one in value.values()):
                monkeypatch.setattr(module, name, {key: WatchedPattern(one) for key, one in value.items()})


BODIES = (
    "",
    "{",
    '{"name": "',
    "f(a=",
    'call:f{a:<|"|>',
    'f">\n<parameter=a>',
    "f>\n<parameter=a>",
    'f">\n<param name="a">',
)
FILLS = ("a", " ", "1,", "[", '"', '<|"|>', "<parameter=a>1</parameter>")


def _texts(markers, size):
    """Each way to begin a call, repeated, and once before much of each filling."""
    for marker in markers:
        for body in BODIES:
            opening = marker + body
            yield opening * (size // len(opening))
            for fill in FILLS:
                yield opening + fill * (size // len(fill))
    nested = "<function=f>\n<parameter=a>"
    yield nested * (size // 60) + "</parameter>" + "<parameter=b>1</parameter>" * (size // 60) + "junk"
    yield '[f(a=f"' + "{a}" * (size // 3) + '")]'


def _steps(stream, pieces):
    Steps.count = 0
    for piece in pieces:
        stream.push(piece)
    stream.finish()
    return Steps.count


def _in_pieces(text, length):
    return [Watched(text[at : at + length]) for at in range(0, len(text), length)]


def _check(make_stream, markers, length):
    for small, large in zip(*(_texts(markers, size) for size in (400, 800)), strict=True):
        few, many = (_steps(make_stream(), _in_pieces(text, length or len(text))) for text in (small, large))
        assert many <= 2.5 * few + 2000, f"{few} and {many} steps for {small[:60]!r} in pieces of {length or 'all'}"


PARSERS = sorted({parser_for(None, name).formats: name for name in sorted(WRITERS)}.values())  # one per set of formats


@pytest.mark.parametrize(
    "length", [pytest.param(0, id="whole", marks=pytest.mark.long), pytest.param(16, id="streamed")]
)
@pytest.mark.parametrize("name", PARSERS)
def test_doubling_the_text_takes_at_most_2_5_times_the_work_of_a_tool_call_parser(watched, name, length):
    parser = parser_for(None, name)
    _check(lambda: parser.stream(TOOLS), parser.markers, length)


@pytest.mark.parametrize("length", [0, 16], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", sorted(REASONING))
def test_doubling_the_text_takes_at_most_2_5_times_the_work_of_a_reasoning_parser(watched, name, length):
    parser = REASONING[name]
    _check(parser.stream, parser.markers, length)


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_many_calls_take_linear_work(watched, name):
    stream = parser_for(None, name).stream
    few, many = (_steps(stream(TOOLS), [Watched(WRITERS[name](*[ROME] * count))]) for count in (50, 100))
    assert many <= 2.5 * few
