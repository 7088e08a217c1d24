"""The Hermes tool-call format: JSON with name and arguments in ``<tool_call>`` tags.

The parsers in ``qwen.py`` also accept this format.
"""

from areno.text.tool_calls.block_scanner import headed_json
from areno.text.tool_calls.parser import CallShape, ToolCallParser

HERMES = ToolCallParser(
    "hermes",
    (headed_json("<tool_call>", ("</tool_call>",), r"\s*"),),
    shape=CallShape('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>", separator="\n"),
)
