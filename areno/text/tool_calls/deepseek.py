"""DeepSeek V3, R1 and V3.1, and Kimi K2: a header that names the tool, then its arguments as JSON, between special tokens."""

from __future__ import annotations

import re

from areno.text.tool_calls.base import CallShape, ToolCallParser
from areno.text.tool_calls.block import Block, HeaderJson

_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
# V3 writes the kind, the separator, the name and a code fence; V3.1 the name, the separator and the bare object.
_HEADER = re.compile(rf"\s*function{_SEP}([^\s{{<]+)\s*+(?:```json)?\s*|\s*([^\s{{<]+){_SEP}\s*")

DEEPSEEK = ToolCallParser(
    "deepseek",
    (Block(_BEGIN, (_END, f"```{_END}", f"```\n{_END}"), lambda start: HeaderJson(start, _HEADER)),),
    wrappers=(_ALL_BEGIN, _ALL_END),
    shape=CallShape(
        before=f"{_BEGIN}function{_SEP}{{bare_name}}\n```json\n",
        after=f"\n```{_END}",
        begin=_ALL_BEGIN,
        separator="\n",
        end=_ALL_END,
    ),
)
DEEPSEEK_V31 = ToolCallParser(
    "deepseek_v31",
    DEEPSEEK.formats,
    wrappers=DEEPSEEK.wrappers,
    shape=CallShape(before=f"{_BEGIN}{{bare_name}}{_SEP}", after=_END, begin=_ALL_BEGIN, end=_ALL_END),
)

_KIMI_BEGIN, _KIMI_ARGS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_HEADER = re.compile(rf"\s*(?:functions\.)?([^\s{{<:]+)(?::\d+)?\s*{re.escape(_KIMI_ARGS)}\s*")
KIMI = ToolCallParser(
    "kimi",
    (Block(_KIMI_BEGIN, (_KIMI_END,), lambda start: HeaderJson(start, _KIMI_HEADER)),),
    wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
