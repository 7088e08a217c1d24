"""Gemma's tool-call format: ``<|tool_call>call:name{key:<|"|>text<|"|>,n:1}<tool_call|>``, with keys without quotes.

FunctionGemma uses the same syntax with different markers.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from areno.text.growing import GrowingText
from areno.text.tool_calls.block_scanner import HeaderJson, block
from areno.text.tool_calls.json_span import Verdict, load_json
from areno.text.tool_calls.parser import ToolCallParser

_HEADER = re.compile(r"\s*call:\s*([^\s{}]+)\s*")
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")


@dataclass(slots=True)
class _GemmaSpan:
    at: int
    opener: str
    quote: str
    token: re.Pattern[str]  # opener, quote or a bracket
    _depth: int = 0
    _quoted: bool = False

    def read(self, source: GrowingText) -> Verdict:
        while True:
            verdict = self._quotation(source) if self._quoted else self._next_token(source.text)
            if verdict is not None:
                return verdict

    def _quotation(self, source: GrowingText) -> Verdict | None:
        end = source.find(self.quote, self.at)
        if end < 0:
            return "open"
        self._quoted = False
        self.at = end + len(self.quote)
        return None

    def _next_token(self, text: str) -> Verdict | None:
        token = self.token.search(text, self.at)
        if token is None:
            # The text may end with the start of a marker.
            self.at = max(self.at, len(text) - max(len(self.opener), len(self.quote)) + 1)
            return "open"
        self.at = token.end()
        if token[0] == self.opener:
            return "broken"
        if token[0] == self.quote:
            self._quoted = True
            return None
        self._depth += 1 if token[0] in "{[" else -1
        return None if self._depth else "closed"


def _parser(name: str, opener: str, closer: str, quote: str) -> ToolCallParser:
    token = re.compile(rf"{re.escape(opener)}|{re.escape(quote)}|[{{}}\[\]]")

    def load(text: str) -> Any:
        parts = text.split(quote)
        parts[::2] = [_BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        return load_json("".join(parts))

    def body(start: int) -> HeaderJson:
        return HeaderJson(start, _HEADER, lambda brace: _GemmaSpan(brace, opener, quote, token), load)

    return ToolCallParser(name, (block(opener, (closer,), body),))


GEMMA = _parser("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _parser("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
