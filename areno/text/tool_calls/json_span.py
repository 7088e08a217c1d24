"""Find the end of a JSON object or array in streamed text, and parse calls in JSON.

The scanner resumes where the previous scan stopped, so a long argument takes linear time. The scanner stops at the first
violation of JSON's syntax, so a brace that does not start a call is usually rejected after a few characters. Line breaks in
strings are allowed.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areno.text.growing import GrowingText

_BLANK = re.compile(r"[ \t\r\n]*")
_STRING_PART = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR_STARTS = re.compile(r"[-0-9tfn]")

Verdict = Literal["open", "closed", "broken"]
_Expect = Literal["value", "first value", "key", "first key", "colon", "comma"]


class ValueSpan(Protocol):
    """Scans streamed text for the end of a value.

    ``at`` is the position up to which the text was scanned. Once the value is closed, this position is the end of the value.
    """

    at: int

    def read(self, source: GrowingText) -> Verdict:
        """Continue scanning the text.

        Return ``closed`` if the end of the value was found, ``broken`` if the text is malformed, and ``open`` if more text is
        needed.
        """


@dataclass(slots=True)
class JsonSpan:
    """Finds the end of the object or array that starts at ``at``."""

    at: int = 0  # current position; the end of the value once it is closed
    _stack: list[str] = field(default_factory=list)
    _expect: _Expect = "value"
    _in_string: bool = False
    _in_scalar: bool = False
    _verdict: Verdict = "open"

    def read(self, source: GrowingText) -> Verdict:
        """Continue scanning the text, which may have grown. Returns ``broken`` if the text is not JSON."""
        text = source.text
        while self._verdict == "open":
            if self._in_string and not self._string(text):
                break
            if self._in_scalar and not self._scalar_ends(text):
                break
            self.at = skip_blank(text, self.at)
            if self.at == len(text):
                break
            self._verdict = self._token(text[self.at]) or "open"
        return self._verdict

    def _token(self, char: str) -> Verdict | None:
        if char == '"' and self._expect != "colon" and self._expect != "comma" and self._stack:
            self._in_string = True
            self.at += 1
            return None
        if char in "]}":
            return self._close(char)
        if char == ":" and self._expect == "colon":
            self._expect = "value"
        elif char == "," and self._expect == "comma":
            self._expect = "key" if self._stack[-1] == "}" else "value"
        elif char in "[{" and self._expect in ("value", "first value"):
            self._stack.append("]" if char == "[" else "}")
            self._expect = "first value" if char == "[" else "first key"
        else:
            return self._scalar(char)
        self.at += 1
        return None

    def _string(self, text: str) -> bool:
        """Scan a string, and return whether its closing quote was found.

        Returns False if ``text`` ends before the closing quote. Once there is more text, the scan continues at ``self.at``.
        """
        self.at = _STRING_PART.match(text, self.at).end()  # type: ignore[union-attr]
        if self.at == len(text) or text[self.at] != '"':
            return False
        self.at += 1
        self._in_string = False
        self._expect = "colon" if self._expect in ("key", "first key") else "comma"
        return True

    def _close(self, char: str) -> Verdict | None:
        fits = self._stack and self._stack[-1] == char and self._expect in ("comma", "first value", "first key")
        if not fits:
            return "broken"
        self.at += 1
        self._stack.pop()
        self._expect = "comma"
        return None if self._stack else "closed"

    def _scalar(self, char: str) -> Verdict | None:
        if not self._stack or self._expect not in ("value", "first value") or not _SCALAR_STARTS.match(char):
            return "broken"
        self._in_scalar = True
        return None

    def _scalar_ends(self, text: str) -> bool:
        self.at = _SCALAR.match(text, self.at).end()  # type: ignore[union-attr]
        if self.at == len(text):
            return False
        self._in_scalar = False
        self._expect = "comma"
        return True


def load_json(text: str) -> Any:
    """Parse JSON, in which strings may contain line breaks. Raises ValueError for invalid JSON and for infinite numbers."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number} is too large")
    return value


def load_arguments(value: Any) -> dict[str, Any] | None:
    """Convert arguments (an object, JSON text or null) to a dict; None if the arguments are invalid."""
    if isinstance(value, str):
        try:
            value = load_json(value) if value.strip() else {}
        except ValueError:
            return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def call_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call, or None if ``value`` is not a call.

    A call has the form ``{"name", "arguments"}``, ``{"name", "parameters"}`` or ``{"function": {...}}``.
    """
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = load_arguments(value.get("arguments", value.get("parameters")))
    return None if arguments is None else (value["name"], arguments)


def array_elements(text: str) -> list[tuple[Any, str]] | None:
    """Return each element of a JSON array with the element's text; None if ``text`` is not an array."""
    decoder = json.JSONDecoder(strict=False, parse_constant=_refuse)
    elements: list[tuple[Any, str]] = []
    try:
        at = skip_blank(text, text.index("[") + 1)
        while text[at] != "]":
            value, end = decoder.raw_decode(text, at)
            elements.append((value, text[at:end]))
            at = skip_blank(text, end)
            at = skip_blank(text, at + 1) if text[at] == "," else at
    except (ValueError, IndexError, RecursionError):
        return None
    return elements


def skip_blank(text: str, at: int, limit: int = sys.maxsize) -> int:
    """Return the position after the JSON white space that starts at ``at``."""
    return _BLANK.match(text, at, limit).end()  # type: ignore[union-attr]
