"""Gemma: ``<|tool_call>call:name{key:<|"|>text<|"|>,n:1}<tool_call|>``, JSON with bare keys and quotes of its own.

FunctionGemma writes the same with other markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from areno.text.growing import GrowingText
from areno.text.tool_calls.base import Malformed, RawCall, ToolCallParser
from areno.text.tool_calls.block import MAX_HEADER, Block, Item
from areno.text.tool_calls.json_span import Verdict, load_json

_HEADER = re.compile(r"\s*call:\s*([^\s{}]+)\s*")
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")


@dataclass(frozen=True, slots=True)
class _Marks:
    opener: str
    quote: str
    token: re.Pattern[str]  # opener, quote or a bracket


@dataclass(slots=True)
class _Body:
    at: int
    marks: _Marks
    resume: int = field(init=False)
    _brace: int = -1
    _depth: int = 0
    _quoted: bool = False

    def __post_init__(self) -> None:
        self.resume = self.at

    def read(self, source: GrowingText) -> Verdict:
        text = source.text
        if self._brace < 0:
            self._brace = text.find("{", self.resume, self.resume + MAX_HEADER + 1)
            if self._brace < 0:
                return "open" if len(text) - self.resume <= MAX_HEADER else "broken"
            if not _HEADER.fullmatch(text, self.resume, self._brace):
                return "broken"
            self.at = self._brace
        while True:
            verdict = self._quotation(source) if self._quoted else self._token(text)
            if verdict is not None:
                return verdict

    def _quotation(self, source: GrowingText) -> Verdict | None:
        end = source.find(self.marks.quote, self.at)
        if end < 0:
            return "open"
        self._quoted = False
        self.at = end + len(self.marks.quote)
        return None

    def _token(self, text: str) -> Verdict | None:
        token = self.marks.token.search(text, self.at)
        if token is None:
            # The beginning of a marker may be here.
            self.at = max(self.at, len(text) - max(len(self.marks.opener), len(self.marks.quote)) + 1)
            return "open"
        self.at = token.end()
        if token[0] == self.marks.opener:
            return "broken"
        if token[0] == self.marks.quote:
            self._quoted = True
            return None
        self._depth += 1 if token[0] in "{[" else -1
        return None if self._depth else "closed"

    def items(self, text: str, source: str) -> Sequence[Item]:
        name = _HEADER.fullmatch(text, self.resume, self._brace)
        parts = text[self._brace : self.at].split(self.marks.quote)
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
    marks = _Marks(opener, quote, re.compile(rf"{re.escape(opener)}|{re.escape(quote)}|[{{}}\[\]]"))
    return ToolCallParser(name, (Block(opener, (closer,), lambda start: _Body(start, marks)),))


GEMMA = _parser("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _parser("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
