"""Mistral: ``[TOOL_CALLS][{"name", "arguments"}, ...]``, and the newer ``[TOOL_CALLS]name[ARGS]{...}`` per call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from areno.text.tool_calls.base import CallShape, Malformed, ToolCallParser
from areno.text.tool_calls.block import Block, HeaderJson, Item, raw_call
from areno.text.tool_calls.json_span import JsonSpan, Verdict, array_elements

_OPENER = "[TOOL_CALLS]"
# The identifier between name and arguments is for the model alone: clients get one in OpenAI's form.
_HEADER = re.compile(r"\s*([^\s{\[]+)\s*(?:\[CALL_ID\][^\s{\[]*)?\s*(?:\[ARGS\])?\s*|\s*")


@dataclass(slots=True)
class _Body:
    at: int
    _start: int = field(init=False)
    _span: JsonSpan | None = None
    _single: HeaderJson | None = None

    def __post_init__(self) -> None:
        self._start = self.at

    def read(self, text: str) -> Verdict:
        if self._span is None and self._single is None:
            body = text[self._start :].lstrip()
            if not body:
                return "open"
            if body[0] == "[":
                self._span = JsonSpan(len(text) - len(body))
            else:
                self._single = HeaderJson(self._start, _HEADER)
        reader = self._span or self._single
        assert reader is not None
        verdict = reader.read(text)
        self.at = reader.at
        return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        if self._single is not None:
            return self._single.items(text, source)
        elements = array_elements(text[self._start : self.at])
        if elements is None:
            return [Malformed(source)]
        return [raw_call(source if len(elements) == 1 else piece, value) for value, piece in elements]


_BLOCK = Block(_OPENER, (), _Body)

MISTRAL = ToolCallParser(
    "mistral",
    (_BLOCK,),
    shape=CallShape(before='{"name": {name}, "arguments": ', after="}", begin=f"{_OPENER}[", separator=", ", end="]"),
)
MISTRAL_ARGS = ToolCallParser(
    "mistral_args", (_BLOCK,), shape=CallShape(before=f"{_OPENER}{{bare_name}}[ARGS]", after="")
)
