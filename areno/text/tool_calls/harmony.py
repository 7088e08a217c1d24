"""gpt-oss: a part of the message that is addressed to a tool, ``<|channel|>commentary to=functions.f<|message|>{...}<|call|>``.

The reasoning parser of the same format brings every such part into this form.
"""

from __future__ import annotations

import re

from areno.text.tool_calls.base import ToolCallParser
from areno.text.tool_calls.block import Block, HeaderJson

_HEADER = re.compile(r"\s*(?:functions\.)?([^\s{<]+)\s*+(?:<\|constrain\|>)?\s*+(?:json)?\s*<\|message\|>\s*")

HARMONY = ToolCallParser(
    "harmony", (Block("<|channel|>commentary to=", ("<|call|>",), lambda start: HeaderJson(start, _HEADER)),)
)
