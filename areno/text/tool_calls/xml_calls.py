"""Tool-call formats with tags around each argument: MiniMax, DeepSeek V3.2, GLM and (see ``qwen.py``) Qwen3-Coder and MiniCPM.

All values are text, and the tool's schema determines their types. A value ends only at its closing tag, so a value may
contain any other tag.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from areno.text.growing import GrowingText
from areno.text.tool_calls.block_scanner import MAX_HEADER, BlockBody, Item, block
from areno.text.tool_calls.json_span import Verdict, skip_blank
from areno.text.tool_calls.parser import CallFormat, CallShape, RawCall, ToolCallParser

_KEY = re.compile(r'\s*"?([^"<>\s]+)')
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of one format.

    The tool's name ends at the earliest marker from ``name_ends``. The parser skips this marker after reading the name.
    Exception: a marker that is also in ``kept`` is not skipped, because it begins the next part of the call.
    """

    name_ends: tuple[str, ...]
    argument: str
    key_end: str
    value: str
    value_end: str
    closer: str
    kept: tuple[str, ...] = ()
    trims_line_breaks: bool = False


@dataclass(slots=True)
class _TagBody(BlockBody):
    tags: _Tags
    name: str | None = None
    arguments: list[tuple[str, int, int]] = field(default_factory=list)  # key, start and end of the value

    def read(self, source: GrowingText) -> Verdict:
        text = source.text
        if self.name is None and not self._read_name(text):
            return "open"
        if not self.name:
            return "broken"
        while True:
            self.at = skip_blank(text, self.at)
            rest = text[self.at : self.at + max(len(self.tags.closer), len(self.tags.argument))]
            if rest.startswith(self.tags.closer):
                return "closed"
            if not rest.startswith(self.tags.argument):
                incomplete = self.tags.closer.startswith(rest) or self.tags.argument.startswith(rest)
                return "open" if incomplete else "broken"
            verdict = self._read_argument(source, self.at + len(self.tags.argument))
            if verdict != "closed":
                return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        arguments = {key: self._value(text[begin:end]) for key, begin, end in self.arguments}
        return [RawCall(self.name or "", arguments, source, untyped=True)]

    def _read_name(self, text: str) -> bool:
        hits = [
            (position, end)
            for end in self.tags.name_ends
            if (position := text.find(end, self.at, self.at + MAX_HEADER + len(end))) >= 0
        ]
        if not hits:
            if len(text) - self.at > MAX_HEADER + max(map(len, self.tags.name_ends)):
                self.name = ""
            return self.name is not None
        position, end = min(hits)
        self.name = text[self.at : position].strip().strip('"')
        self.at = position if end in self.tags.kept else position + len(end)
        if re.search(r"[\s<>{}]", self.name):
            self.name = ""
        return True

    def _read_argument(self, source: GrowingText, start: int) -> Verdict:
        text = source.text
        key_end = text.find(self.tags.key_end, start, start + MAX_HEADER + len(self.tags.key_end))
        if key_end < 0:
            return "open" if len(text) - start < MAX_HEADER + len(self.tags.key_end) else "broken"
        key = _KEY.match(text, start, key_end)
        if key is None:
            return "broken"
        begin = key_end + len(self.tags.key_end)
        if self.tags.value:
            begin = skip_blank(text, begin, begin + MAX_HEADER)
            rest = text[begin : begin + len(self.tags.value)]
            if rest != self.tags.value:
                return "open" if self.tags.value.startswith(rest) else "broken"
            begin += len(self.tags.value)
        end = source.find(self.tags.value_end, begin)
        if end < 0:
            return "open"
        self.arguments.append((key[1], begin, end))
        self.at = self.resume = end + len(self.tags.value_end)
        return "closed"

    def _value(self, text: str) -> str:
        if self.tags.trims_line_breaks:
            text = text.removeprefix("\n").removesuffix("\n")
        cdata = _CDATA.fullmatch(text)
        return cdata[1] if cdata else text


def _block(opener: str, tags: _Tags) -> CallFormat:
    return block(opener, (tags.closer,), lambda start: _TagBody(start, tags))


FUNCTION_TAGS = _block(
    "<function=", _Tags((">",), "<parameter=", ">", "", "</parameter>", "</function>", trims_line_breaks=True)
)
MINICPM_TAGS = _block(
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
