"""gpt-oss's tool-call format: message parts that are addressed to a tool.

The input of this parser is the output of :mod:`areno.text.reasoning`, in which each such part has the form
``<|channel|>commentary to=NAME<|message|>{...}<|call|>``.
"""

from areno.text.tool_calls.block_scanner import headed_json
from areno.text.tool_calls.parser import ToolCallParser

_HEADER = r"\s*(?:functions\.)?([^\s{<]+)\s*+(?:<\|constrain\|>)?\s*+(?:json)?\s*<\|message\|>\s*"
HARMONY = ToolCallParser("harmony", (headed_json("<|channel|>commentary to=", ("<|call|>",), _HEADER),))
