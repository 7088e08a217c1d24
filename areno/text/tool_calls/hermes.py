r"""Hermes, Qwen and MiniCPM: ``<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>``, one block per call.

Qwen3-Coder and Qwen 3.5 write tags inside the block; their smaller siblings mix the two, so Qwen's parsers read both.
MiniCPM writes tags of its own without a block, and those of Qwen where it is built on Qwen's language model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from areno.text.growing import GrowingText
from areno.text.tool_calls.base import CallScanner, CallShape, Outcome, ToolCallParser, Wrapper
from areno.text.tool_calls.block import Block, HeaderJson
from areno.text.tool_calls.xml_calls import FUNCTION_TAGS, MINICPM_TAGS

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_JSON_SHAPE = CallShape(before=f'{_OPENER}\n{{"name": {{name}}, "arguments": ', after=f"}}\n{_CLOSER}", separator="\n")
_JSON_BLOCK = Block(_OPENER, (_CLOSER,), lambda start: HeaderJson(start, re.compile(r"\s*")))
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class _TagOrJson:
    """``<tool_call>`` may also wrap a call in tags, which begins with one of ``tags``; then it is a mere wrapper."""

    tags: tuple[str, ...]
    openers: tuple[str, ...] = (_OPENER,)

    def scanner(self, start: int) -> CallScanner:
        return _TagOrJsonScanner(self.tags, start + len(_OPENER), _JSON_BLOCK.scanner(start))


@dataclass(slots=True)
class _TagOrJsonScanner:
    tags: tuple[str, ...]
    at: int
    json: CallScanner

    def scan(self, source: GrowingText, final: bool) -> Outcome | None:
        body = self.at = _SPACE.match(source.text, self.at).end()  # type: ignore[union-attr]
        begun = source.text[body : body + max(map(len, self.tags))]
        if begun.startswith(self.tags):
            return Outcome(body, [Wrapper()])
        if any(tag.startswith(begun) for tag in self.tags) and not final:
            return None
        return self.json.scan(source, final)


HERMES = ToolCallParser("hermes", (_JSON_BLOCK,), shape=_JSON_SHAPE)
QWEN = ToolCallParser(
    "qwen", (_TagOrJson((FUNCTION_TAGS.opener,)), FUNCTION_TAGS), wrappers=(_CLOSER,), shape=_JSON_SHAPE
)
QWEN3_CODER = ToolCallParser(
    "qwen3_coder",
    QWEN.formats,
    wrappers=QWEN.wrappers,
    shape=CallShape(
        before=f"{_OPENER}\n<function={{bare_name}}>\n",
        after=f"</function>\n{_CLOSER}",
        separator="\n",
        argument_before="<parameter={key}>\n",
        argument_after="\n</parameter>\n",
    ),
)
MINICPM = ToolCallParser(
    "minicpm",
    (_TagOrJson((FUNCTION_TAGS.opener, MINICPM_TAGS.opener)), FUNCTION_TAGS, MINICPM_TAGS),
    wrappers=QWEN.wrappers,
    shape=CallShape(
        before='<function name="{bare_name}">',
        after="</function>",
        argument_before='<param name="{key}">',
        argument_after="</param>",
    ),
)
