"""Qwen and MiniCPM: the blocks of Hermes, one per call.

Qwen3-Coder and Qwen 3.5 write tags inside the block; their smaller siblings mix the two, so Qwen's parsers read both.
MiniCPM writes tags of its own without a block, and those of Qwen where it is built on Qwen's language model.
"""

import re
from dataclasses import dataclass

from areno.text.growing import GrowingText
from areno.text.tool_calls.base import CallFormat, CallShape, Outcome, Scan, ToolCallParser
from areno.text.tool_calls.block import HERMES
from areno.text.tool_calls.xml_calls import FUNCTION_TAGS, MINICPM_TAGS

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")


def _tag_or_json(*tags: str) -> CallFormat:
    """``<tool_call>`` may also wrap a call in tags, which begins with one of ``tags``; then it is a mere wrapper."""
    (json_block,) = HERMES.formats

    def scanner(start: int) -> Scan:
        return _TagOrJsonScanner(tags, start + len(_OPENER), json_block.scanner(start)).scan

    return CallFormat((_OPENER,), scanner)


@dataclass(slots=True)
class _TagOrJsonScanner:
    tags: tuple[str, ...]
    at: int
    json: Scan

    def scan(self, source: GrowingText, final: bool) -> Outcome | None:
        body = self.at = _SPACE.match(source.text, self.at).end()  # type: ignore[union-attr]
        begun = source.text[body : body + max(map(len, self.tags))]
        if begun.startswith(self.tags):
            return Outcome(body, [])
        if any(tag.startswith(begun) for tag in self.tags) and not final:
            return None
        return self.json(source, final)


QWEN = ToolCallParser(
    "qwen", (_tag_or_json(*FUNCTION_TAGS.openers), FUNCTION_TAGS), wrappers=(_CLOSER,), shape=HERMES.shape
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
    (_tag_or_json(*FUNCTION_TAGS.openers, *MINICPM_TAGS.openers), FUNCTION_TAGS, MINICPM_TAGS),
    wrappers=QWEN.wrappers,
    shape=CallShape(
        before='<function name="{bare_name}">',
        after="</function>",
        argument_before='<param name="{key}">',
        argument_after="</param>",
    ),
)
