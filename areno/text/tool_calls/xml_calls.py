"""Formats that write each argument between tags of its own: MiniCPM, MiniMax, DeepSeek V3.2, GLM and (see
``hermes.py``) Qwen3-Coder.

All values are text there; the tool's schema says what they stand for. A value ends at its closing tag only, so it may
hold any other tag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from areno.text.tool_calls.base import CallShape, RawCall, ToolCallParser
from areno.text.tool_calls.block import Block, Item
from areno.text.tool_calls.json_span import Verdict

_BLANK = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r'\s*"?([^"<>\s]+)')
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of one format; ``name_ends`` that are in ``kept`` belong to what follows the name."""

    name_ends: tuple[str, ...]
    argument: str
    key_end: str
    value: str
    value_end: str
    closer: str
    kept: tuple[str, ...] = ()
    trims_line_breaks: bool = False


@dataclass(slots=True)
class _TagBody:
    at: int
    tags: _Tags
    name: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)

    def read(self, text: str) -> Verdict:
        if self.name is None and not self._read_name(text):
            return "open"
        if not self.name:
            return "broken"
        while True:
            place = _BLANK.match(text, self.at).end()  # type: ignore[union-attr]
            rest = text[place : place + max(len(self.tags.closer), len(self.tags.argument))]
            if rest.startswith(self.tags.closer):
                return "closed"
            if not rest.startswith(self.tags.argument):
                under_way = self.tags.closer.startswith(rest) or self.tags.argument.startswith(rest)
                return "open" if under_way else "broken"
            verdict = self._read_argument(text, place + len(self.tags.argument))
            if verdict != "closed":
                return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        return [RawCall(self.name or "", dict(self.arguments), source, untyped=True)]

    def _read_name(self, text: str) -> bool:
        found = [(place, end) for end in self.tags.name_ends if (place := text.find(end, self.at)) >= 0]
        if not found:
            return False
        place, end = min(found)
        self.name = text[self.at : place].strip().strip('"')
        self.at = place if end in self.tags.kept else place + len(end)
        if re.search(r"[\s<>{}]", self.name):
            self.name = ""
        return True

    def _read_argument(self, text: str, start: int) -> Verdict:
        key_end = text.find(self.tags.key_end, start)
        if key_end < 0:
            return "open"
        key = _KEY.match(text, start, key_end)
        if key is None:
            return "broken"
        begin = key_end + len(self.tags.key_end)
        if self.tags.value:
            begin = _BLANK.match(text, begin).end()  # type: ignore[union-attr]
            rest = text[begin : begin + len(self.tags.value)]
            if rest != self.tags.value:
                return "open" if self.tags.value.startswith(rest) else "broken"
            begin += len(self.tags.value)
        end = text.find(self.tags.value_end, begin)
        if end < 0:
            return "open"
        self.arguments[key[1]] = self._value(text[begin:end])
        self.at = end + len(self.tags.value_end)
        return "closed"

    def _value(self, text: str) -> str:
        if self.tags.trims_line_breaks:
            text = text.removeprefix("\n").removesuffix("\n")
        cdata = _CDATA.fullmatch(text)
        return cdata[1] if cdata else text


def _block(opener: str, tags: _Tags) -> Block:
    return Block(opener, (tags.closer,), lambda start: _TagBody(start, tags))


FUNCTION_TAGS = _block(
    "<function=",
    _Tags((">",), "<parameter=", ">", "", "</parameter>", "</function>", trims_line_breaks=True),
)
_MINICPM = _block(
    "<function name=", _Tags((">",), "<param name=", ">", "", "</param>", "</function>", trims_line_breaks=True)
)
_MINIMAX = _block(
    "<invoke name=", _Tags((">",), "<parameter name=", ">", "", "</parameter>", "</invoke>", trims_line_breaks=True)
)
_DSML = _block(
    "<｜DSML｜invoke name=",
    _Tags((">",), "<｜DSML｜parameter name=", ">", "", "</｜DSML｜parameter>", "</｜DSML｜invoke>"),
)
_GLM_ENDS = ("\n", "<arg_key>", "</tool_call>")
_GLM = _block(
    "<tool_call>",
    _Tags(_GLM_ENDS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", kept=_GLM_ENDS[1:]),
)

MINICPM = ToolCallParser(
    "minicpm",
    (_MINICPM,),
    shape=CallShape(
        before='<function name="{bare_name}">',
        after="</function>",
        argument_before='<param name="{key}">',
        argument_after="</param>",
    ),
)
MINIMAX = ToolCallParser(
    "minimax",
    (_MINIMAX,),
    wrappers=("<minimax:tool_call>", "</minimax:tool_call>"),
    shape=CallShape(
        before='<invoke name="{bare_name}">\n',
        after="</invoke>\n",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        argument_before='<parameter name="{key}">',
        argument_after="</parameter>\n",
    ),
)
DEEPSEEK_V32 = ToolCallParser(
    "deepseek_v32", (_DSML,), wrappers=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
)
GLM = ToolCallParser(
    "glm",
    (_GLM,),
    shape=CallShape(
        before="<tool_call>{bare_name}\n",
        after="</tool_call>",
        separator="\n",
        argument_before="<arg_key>{key}</arg_key>\n<arg_value>",
        argument_after="</arg_value>\n",
    ),
)
