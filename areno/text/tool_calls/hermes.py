r"""Hermes and Qwen: ``<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>``, one block per call.

Qwen3-Coder and Qwen 3.5 write tags inside the block; their smaller siblings mix the two, so Qwen's parsers read both.
"""

from __future__ import annotations

import re

from areno.text.tool_calls.base import CallScanner, CallShape, Outcome, ToolCallParser, Wrapper
from areno.text.tool_calls.block import Block, HeaderJson
from areno.text.tool_calls.xml_calls import FUNCTION_TAGS

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_JSON_SHAPE = CallShape(before=f'{_OPENER}\n{{"name": {{name}}, "arguments": ', after=f"}}\n{_CLOSER}", separator="\n")
_JSON_BLOCK = Block(_OPENER, (_CLOSER,), lambda start: HeaderJson(start, re.compile(r"\s*")))


class _TagOrJson:
    """``<tool_call>`` may also wrap a call in tags; then it is a mere wrapper."""

    openers = (_OPENER,)

    def scanner(self) -> CallScanner:
        return _TagOrJsonScanner()


class _TagOrJsonScanner:
    def __init__(self) -> None:
        self._json = _JSON_BLOCK.scanner()

    def scan(self, text: str, final: bool) -> Outcome | None:
        body = text[len(_OPENER) :].lstrip()
        tag = FUNCTION_TAGS.opener
        if body.startswith(tag):
            return Outcome(len(_OPENER), [Wrapper(_OPENER)])
        if tag.startswith(body) and not final:
            return None
        return self._json.scan(text, final)


HERMES = ToolCallParser("hermes", (_JSON_BLOCK,), shape=_JSON_SHAPE)
QWEN = ToolCallParser("qwen", (_TagOrJson(), FUNCTION_TAGS), wrappers=(_CLOSER,), shape=_JSON_SHAPE)
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
