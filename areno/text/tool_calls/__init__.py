"""Parse tool calls in complete or streamed messages, and detect the format of a model's calls.

``parser_for(tokenizer).parse(text, tools)`` splits a message into text and calls. ``parser_for(tokenizer).stream(tools)``
creates a parser for one streamed message. To add a format, call :func:`register_tool_call_parser` with a name and a
:class:`ToolCallParser`.

- ``registry``: lists the formats by name, and detects a model's format
- ``parser``: the parser that all formats share
- ``hermes``, ``qwen``, ``deepseek``, ``kimi``, ``harmony`` (gpt-oss), ``mistral``, ``gemma``, ``json_calls`` (Llama 3 and bare
  JSON), ``pythonic`` (Llama 4), ``xml_calls`` (GLM, MiniMax, Qwen3-Coder): the formats
- ``block_scanner``: finds blocks between an opening and a closing tag
- ``json_span``: finds the end of a JSON value
- ``schema``: converts text arguments to the types of a tool's schema
"""

from areno.text.tool_calls.parser import (
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
