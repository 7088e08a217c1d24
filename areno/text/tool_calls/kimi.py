"""Kimi K2's tool-call format: ``functions.NAME:INDEX`` and a JSON object, with special tokens before, between and after."""

from areno.text.tool_calls.block_scanner import headed_json
from areno.text.tool_calls.parser import ToolCallParser

_HEADER = r"\s*(?:functions\.)?([^\s{<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
KIMI = ToolCallParser(
    "kimi",
    (headed_json("<|tool_call_begin|>", ("<|tool_call_end|>",), _HEADER),),
    wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
