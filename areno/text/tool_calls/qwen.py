"""The tool-call formats of Qwen and MiniCPM.

Qwen writes each call in a ``<tool_call>`` block, as in the Hermes format. Qwen3-Coder and Qwen 3.5 write tags instead of JSON
inside the block. MiniCPM writes its own tags without a block; MiniCPM models based on Qwen write Qwen's tags. The parsers in
this module accept tags and JSON, because smaller models mix the formats.
"""

import re
from dataclasses import dataclass

from areno.text.growing import GrowingText
from areno.text.tool_calls.hermes import HERMES
from areno.text.tool_calls.parser import CallFormat, CallShape, Scan, ScanResult, ToolCallParser
from areno.text.tool_calls.xml_calls import FUNCTION_TAGS, MINICPM_TAGS

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")


def _tag_or_json(*tags: str) -> CallFormat:
    """Create the format of ``<tool_call>`` blocks with JSON.

    If one of ``tags`` follows ``<tool_call>``, then ``<tool_call>`` is a wrapper (see :class:`ScanResult`), and the call is
    parsed by the format that begins with this tag.
    """
    (json_block,) = HERMES.formats

    def scanner(start: int) -> Scan:
        return _TagOrJsonScanner(tags, start + len(_OPENER), json_block.scanner(start)).scan

    return CallFormat((_OPENER,), scanner)


@dataclass(slots=True)
class _TagOrJsonScanner:
    tags: tuple[str, ...]
    at: int
    json: Scan

    def scan(self, source: GrowingText, final: bool) -> ScanResult | None:
        body = self.at = _SPACE.match(source.text, self.at).end()  # type: ignore[union-attr]
        prefix = source.text[body : body + max(map(len, self.tags))]
        if prefix.startswith(self.tags):
            return ScanResult(body, [])
        if any(tag.startswith(prefix) for tag in self.tags) and not final:
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
