"""Parses tool calls in complete or streamed messages: the formats, and detection of a model's format.

``parser_for(tokenizer).parse(text, tools)`` splits a message into text and calls; ``.stream(tools)`` does so incrementally.
A custom format is a :class:`ToolCallParser` registered under a name.
"""

from areno.text.tool_calls.base import (
    ContentDelta,
    ParsedMessage,
    StreamingParser,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    selectable_tools,
)
from areno.text.tool_calls.registry import list_tool_call_parsers, parser_for, register_tool_call_parser

__all__ = [
    "ContentDelta",
    "ParsedMessage",
    "StreamingParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "list_tool_call_parsers",
    "parser_for",
    "register_tool_call_parser",
    "selectable_tools",
]
