"""Tool calls as a Python list: ``[get_weather(city="Rome"), now()]``. Llama 3.2, Llama 4 and other models use this format."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areno.text.growing import GrowingText
from areno.text.tool_calls.block_scanner import MAX_HEADER
from areno.text.tool_calls.json_span import Verdict
from areno.text.tool_calls.parser import CallFormat, Malformed, PlainText, RawCall, ScanResult, ToolCallParser

_START = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_PARTIAL_START = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?")
_TOKEN = re.compile(r"""[\[\](){}"']""")
_LOOKS_LIKE_A_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(\s*[A-Za-z_]\w*\s*=")
_WORD = re.compile(r"\w*$")
_STRING_PREFIXES = {"", "r", "u", "b", "br", "rb", "f", "fr", "rf"}
_STRING_PARTS = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"}
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(slots=True)
class _PythonicScanner:
    start: int
    _at: int
    _depth: int = 0
    _quote: str = ""  # quote of the string being scanned
    _has_f_string: bool = False  # f-strings are not values, and take Python quadratic time to parse

    def scan(self, source: GrowingText, final: bool) -> ScanResult | None:
        text, limit = source.text, self.start + MAX_HEADER
        if not _START.match(text, self.start, limit):
            if len(text) < limit and _PARTIAL_START.fullmatch(text, self.start) and not final:
                return None
            return ScanResult(self.start + 1, [PlainText("[")])
        verdict = self._read(text)
        if verdict == "open":
            return ScanResult(len(text), [Malformed(text[self.start :])]) if final else None
        piece = text[self.start : self._at]
        if verdict == "broken":
            return ScanResult(self._at, [(Malformed if _LOOKS_LIKE_A_CALL.match(piece) else PlainText)(piece)])
        return ScanResult(self._at, [Malformed(piece)] if self._has_f_string else _items(piece))

    def _read(self, text: str) -> Verdict:
        while True:
            if self._quote:
                self._at = _STRING_PARTS[self._quote].match(text, self._at).end()  # type: ignore[union-attr]
                if text[self._at : self._at + 1] != self._quote:
                    return "open"
                self._at += 1
                self._quote = ""
            token = _TOKEN.search(text, self._at)
            self._at = token.end() if token else len(text)
            if token is None:
                return "open"
            if token[0] in _STRING_PARTS:
                prefix = _WORD.search(text[max(token.start() - 3, 0) : token.start()].lower())[0]  # type: ignore[index]
                if prefix not in _STRING_PREFIXES:
                    return "broken"  # an apostrophe in prose
                self._quote = token[0]
                self._has_f_string |= "f" in prefix
            else:
                self._depth += 1 if token[0] in "[({" else -1
                if not self._depth:
                    return "closed"


def _items(text: str) -> Sequence[RawCall | Malformed]:
    try:
        listed = ast.parse(text, mode="eval").body
        calls = listed.elts if isinstance(listed, ast.List) else []
        sources = [text] if len(calls) == 1 else _sources(text, calls)
        return [_call(*pair) for pair in zip(calls, sources, strict=True)] or [Malformed(text)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [Malformed(text)]


def _sources(text: str, nodes: Sequence[ast.expr]) -> list[str]:
    """Return the source text of each node in linear time.

    ``ast.get_source_segment`` would take quadratic time, because each call splits the whole text into lines.
    """
    data = text.encode()
    lines = [0, *(match.end() for match in re.finditer(rb"\r\n?|\n", data))]
    return [
        data[lines[node.lineno - 1] + node.col_offset : lines[node.end_lineno - 1] + node.end_col_offset].decode()  # type: ignore[operator]
        for node in nodes
    ]


def _call(call: ast.expr, source: str) -> RawCall | Malformed:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, (ast.Name, ast.Attribute)):
        return Malformed(source)
    try:
        arguments = {keyword.arg or "": _value(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError):
        return Malformed(source)
    return Malformed(source) if "" in arguments else RawCall(ast.unparse(call.func), arguments, source)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    key = ast.literal_eval(node) if node is not None else None
    if not isinstance(key, str):
        raise ValueError("keys of JSON objects must be strings")
    return key


PYTHONIC = ToolCallParser("pythonic", (CallFormat(("[",), lambda start: _PythonicScanner(start, start).scan),))
