"""Tool calls as bare JSON: ``{"name", "arguments"}``, a list of these objects, or ``{"tool_calls": [...]}``.

Text may precede and follow a call. JSON that does not describe a call is treated as text. Llama 3 writes ``{"name",
"parameters"}``, sometimes after ``<|python_tag|>``, and with ``;`` between two calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.text.growing import GrowingText
from areno.text.tool_calls.block_scanner import MAX_HEADER, raw_call
from areno.text.tool_calls.json_span import JsonSpan, array_elements, load_json, skip_blank
from areno.text.tool_calls.parser import (
    CallFormat,
    CallShape,
    Malformed,
    PlainText,
    RawCall,
    ScanResult,
    ToolCallParser,
)

_FENCE, _FENCE_END = "```json", "```"
_START = re.compile(r"(?:```json[ \t\r\n]*)?(?=(?:\[[ \t\r\n]*)?\{)")
_PARTIAL_START = re.compile(r"(?:```json[ \t\r\n]*)?(?:\[[ \t\r\n]*)?")
_LOOKS_LIKE_A_CALL = re.compile(r'[ \t\r\n\[]*\{\s*"(?:name|function|tool_calls)"\s*:')


@dataclass(slots=True)
class _BareJsonScanner:
    start: int
    _value: int = 0  # start of the JSON value
    _span: JsonSpan | None = None
    _after: int = 0  # position after the white space that follows the value

    def scan(self, source: GrowingText, final: bool) -> ScanResult | None:
        text = source.text
        if self._span is None:
            limit = self.start + MAX_HEADER
            head = _START.match(text, self.start, limit)
            if head is None:
                if len(text) < limit and _PARTIAL_START.fullmatch(text, self.start) and not final:
                    return None
                opener = _FENCE if text.startswith(_FENCE, self.start) else text[self.start]
                return ScanResult(self.start + len(opener), [PlainText(opener)])
            self._value = head.end()
            self._span = JsonSpan(self._value)
        verdict = self._span.read(source)
        if verdict == "closed":
            return self._closed(text, self._span.at, final)
        if verdict == "open" and not final:
            return None
        # Broken: prose with a brace, after which a call may follow. Still open at the end of the message: a truncated call.
        end = len(text) if verdict == "open" else max(self._span.at, self._value + 1)
        kind = Malformed if _LOOKS_LIKE_A_CALL.match(text, self._value, end) else PlainText
        return ScanResult(end, [kind(text[self.start : end])])

    def _closed(self, text: str, value_end: int, final: bool) -> ScanResult | None:
        end = value_end
        if text.startswith(_FENCE, self.start):
            self._after = skip_blank(text, max(self._after, value_end))
            rest = text[self._after : self._after + len(_FENCE_END)]
            if rest == _FENCE_END:
                end = self._after + len(_FENCE_END)
            elif _FENCE_END.startswith(rest) and not final:
                return None
        return ScanResult(end, _items(text[self.start : end], text[self._value : value_end]))


def _items(source: str, value_text: str) -> Sequence[RawCall | Malformed | PlainText]:
    try:
        value = load_json(value_text)
    except ValueError:
        kind = Malformed if _LOOKS_LIKE_A_CALL.match(value_text) else PlainText
        return [kind(source)]
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
        pieces = [(one, json.dumps(one, ensure_ascii=False)) for one in value["tool_calls"]]
    else:
        pieces = (array_elements(value_text) or []) if isinstance(value, list) else [(value, source)]
    if not pieces or not all(_describes_a_call(one) for one, _ in pieces):
        return [PlainText(source)]
    return [raw_call(source if len(pieces) == 1 else piece, one) for one, piece in pieces]


def _describes_a_call(value: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("name"), str)
        and ("arguments" in value or "parameters" in value)
    )


_BARE_JSON = CallFormat(("{", "[", _FENCE), lambda start: _BareJsonScanner(start).scan)
JSON = ToolCallParser("json", (_BARE_JSON,), shape=CallShape('{"name": {name}, "arguments": ', "}", separator="\n"))
LLAMA3 = ToolCallParser(
    "llama3",
    (_BARE_JSON,),
    wrappers=("<|python_tag|>",),
    separators=";",
    shape=CallShape('{"name": {name}, "parameters": ', "}", separator="; "),
)
