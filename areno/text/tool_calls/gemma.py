"""Gemma: ``<|tool_call>call:name{key:<|"|>text<|"|>,n:1}<tool_call|>``, JSON with bare keys and quotes of its own.

FunctionGemma writes the same with other markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from areno.text.tool_calls.base import Malformed, RawCall, ToolCallParser
from areno.text.tool_calls.block import Block, Item
from areno.text.tool_calls.json_span import Verdict, load_json

_HEADER = re.compile(r"\s*call:\s*([^\s{}]+)\s*")
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")
_BRACKET = re.compile(r"[{}\[\]]")
_MAX_HEADER = 256


@dataclass(slots=True)
class _Body:
    at: int
    quote: str
    _start: int = field(init=False)
    _brace: int = -1
    _depth: int = 0
    _quoted: bool = False

    def __post_init__(self) -> None:
        self._start = self.at

    def read(self, text: str) -> Verdict:
        if self._brace < 0:
            self._brace = text.find("{", self._start)
            if (self._brace if self._brace >= 0 else len(text)) - self._start > _MAX_HEADER:
                return "broken"
            if self._brace < 0:
                return "open"
            if not _HEADER.fullmatch(text, self._start, self._brace):
                return "broken"
            self.at = self._brace
        return self._brackets(text)

    def _brackets(self, text: str) -> Verdict:
        while True:
            quote = text.find(self.quote, self.at)
            bracket = None if self._quoted else _BRACKET.search(text, self.at)
            if quote >= 0 and (bracket is None or quote < bracket.start()):
                self._quoted = not self._quoted
                self.at = quote + len(self.quote)
            elif bracket is None:
                self.at = max(self.at, len(text) - len(self.quote) + 1)  # the beginning of a quote may be here
                return "open"
            else:
                self.at = bracket.end()
                self._depth += 1 if bracket[0] in "{[" else -1
                if not self._depth:
                    return "closed"

    def items(self, text: str, source: str) -> Sequence[Item]:
        name = _HEADER.fullmatch(text, self._start, self._brace)
        parts = text[self._brace : self.at].split(self.quote)
        parts[::2] = [_BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        try:
            arguments = load_json("".join(parts))
        except ValueError:
            return [Malformed(source)]
        if name is None or not isinstance(arguments, dict):
            return [Malformed(source)]
        return [RawCall(name[1], arguments, source)]


def _parser(name: str, opener: str, closer: str, quote: str) -> ToolCallParser:
    return ToolCallParser(name, (Block(opener, (closer,), lambda start: _Body(start, quote)),))


GEMMA = _parser("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _parser("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
