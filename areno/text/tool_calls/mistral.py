"""Mistral's tool-call formats: ``[TOOL_CALLS][{"name", "arguments"}, ...]`` and ``[TOOL_CALLS]name[ARGS]{...}`` (newer)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from areno.text.growing import GrowingText
from areno.text.tool_calls.block_scanner import BlockBody, HeaderJson, Item, block, raw_call
from areno.text.tool_calls.json_span import JsonSpan, Verdict, array_elements
from areno.text.tool_calls.parser import CallShape, Malformed, ToolCallParser

_OPENER = "[TOOL_CALLS]"
# The model's call id is dropped: clients get an id in OpenAI's format.
_HEADER = re.compile(r"\s*([^\s{\[]+)\s*+(?:\[CALL_ID\][^\s{\[]*)?\s*+(?:\[ARGS\])?\s*|\s*")

_SPACE = re.compile(r"\s*")


@dataclass(slots=True)
class _MistralBody(BlockBody):
    _reader: JsonSpan | HeaderJson | None = None

    def read(self, source: GrowingText) -> Verdict:
        if self._reader is None:
            text = source.text
            self.at = _SPACE.match(text, self.at).end()  # type: ignore[union-attr]
            if self.at == len(text):
                return "open"
            self._reader = JsonSpan(self.at) if text[self.at] == "[" else HeaderJson(self.resume, _HEADER)
        verdict = self._reader.read(source)
        self.at = self._reader.at
        return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        if isinstance(self._reader, HeaderJson):
            return self._reader.items(text, source)
        elements = array_elements(text[self.resume : self.at])
        if not elements:
            return [Malformed(source)]
        return [raw_call(source if len(elements) == 1 else piece, value) for value, piece in elements]


_BLOCK = block(_OPENER, (), _MistralBody)

MISTRAL = ToolCallParser(
    "mistral",
    (_BLOCK,),
    shape=CallShape(before='{"name": {name}, "arguments": ', after="}", begin=f"{_OPENER}[", separator=", ", end="]"),
)
MISTRAL_ARGS = ToolCallParser(
    "mistral_args", (_BLOCK,), shape=CallShape(before=f"{_OPENER}{{bare_name}}[ARGS]", after="")
)
