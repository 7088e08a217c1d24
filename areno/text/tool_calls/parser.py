"""Shared parts of all tool-call formats: the parsed message, and the incremental parser.

A :class:`CallFormat` describes how a call is written. The parser of this module finds calls by their markers, emits the
text between calls, and validates calls. Only complete and valid calls are emitted as calls. A malformed call is emitted
as text. The incremental parser also parses complete messages, as a single piece. A message therefore gives the same result
whether it is streamed or complete.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from areno.errors import UsageError
from areno.text.growing import GrowingText
from areno.text.tool_calls.schema import typed_arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. As OpenAI clients expect, ``arguments`` is the compact text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A parsed message: text, calls, or both."""

    content: str | None  # text without calls; None if there are only calls
    tool_calls: list[ToolCall]  # calls in order
    malformed: int  # number of calls that cannot be parsed or name an unknown tool; they remain part of the text


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call. ``index`` is the number of the call in the message, counted from 0.

    Only the first piece of a call has ``id`` and ``name``.
    """

    index: int
    id: str | None
    name: str | None
    arguments_piece: str


Delta = ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as parsed from the text, not yet validated."""

    name: str  # name of the tool
    arguments: dict[str, Any]  # arguments by name; all values are str if ``untyped``
    source: str  # the original text, emitted if the call is rejected
    untyped: bool = (
        False  # whether the format writes all values as text, so that the tool's schema determines their types
    )


@dataclass(frozen=True, slots=True)
class Malformed:
    """A malformed call, which is emitted as text and counted."""

    source: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text that begins like a call, but is not a call."""

    source: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The result of scanning a message from an opening marker up to the position ``end``.

    ``items`` lists, in order, what the scanned text contains: calls, malformed calls and plain text.

    If ``items`` is empty, the scanned text is a wrapper: a tag, such as Qwen3-Coder's ``<tool_call>``, that only encloses calls
    of another format. If a call directly follows a wrapper, the wrapper is dropped. Wrappers after a call are dropped if the
    message contains no further text. Any other wrapper is emitted as text.
    """

    end: int
    items: Sequence[RawCall | Malformed | PlainText]


Scan = Callable[[GrowingText, bool], ScanResult | None]
"""Scans one call, or one block of calls, starting at the opening marker.

The arguments are the message so far, and whether the message is final. A scanner returns None if it needs more text.
For a final message, a scanner always returns a result. The result must not depend on how the text was split into
pieces.

A message may contain many opening markers that start no call. To parse such a message in linear time, a scanner must follow
these rules:

- If the scanner is called again with more text, it continues at the position that its last call reached.
- It finds markers with :meth:`GrowingText.find`.
- It does not read far beyond the ``end`` of the result that it returns.
"""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A syntax in which a model writes calls."""

    openers: tuple[str, ...]  # opening markers; none contains another one
    scanner: Callable[[int], Scan]  # creates a scanner for the opening marker at this position


@dataclass(frozen=True, slots=True)
class CallShape:
    r"""The serialization of calls, used to build grammars that force a call.

    The serialized text consists of ``begin``, the calls with ``separator`` between them, and ``end``. A call consists of
    ``before``, the arguments, and ``after``. In ``before``, ``{name}`` is the tool's name as a JSON string, and
    ``{bare_name}`` is the plain name.

    By default, the arguments are one JSON object. If ``argument_before`` and ``argument_after`` are set, these texts
    enclose each argument. In this case, strings are written verbatim, and all other values are written as JSON. In
    ``argument_before``, ``{key}`` is the argument's name.
    """

    before: str
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    argument_before: str = ""
    argument_after: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """A named set of call formats. One parser can parse any number of messages."""

    name: str  # as in ``--tool-call-parser``
    formats: tuple[CallFormat, ...]  # the formats in which the model writes calls
    wrappers: tuple[str, ...] = ()  # markers that surround calls and have no further meaning
    separators: str = ""  # characters besides white space that may separate two calls
    shape: CallShape | None = None  # serialization for grammars; None if unsupported

    @property
    def markers(self) -> tuple[str, ...]:
        """The opening markers of all ``formats``, and the markers around calls (``wrappers``).

        Some of these markers may be special tokens. In this case, decode a message with ``skip_special_tokens=False``.
        Otherwise, the decoded message lacks the markers, and the parser finds no calls.
        """
        return tuple(opener for form in self.formats for opener in form.openers) + self.wrappers

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = "auto") -> ParsedMessage:
        """Split a complete message into text and calls.

        Args:
            tools: tools in OpenAI's format, or in the flat format ``{"name", "parameters"}``.
            tool_choice: ``auto``, ``required``, ``none``, or the only tool that may be called, in one of the formats
                allowed for ``tools``. For ``none``, the whole message is text.

        Raises:
            UsageError: a tool or ``tool_choice`` is invalid.
        """
        stream = self.stream(tools, tool_choice)
        content, calls = "", []
        for delta in stream.push(text) + stream.finish():
            if isinstance(delta, ContentDelta):
                content += delta.text
            else:
                calls.append(ToolCall(delta.id or "", delta.name or "", delta.arguments_piece))
        return ParsedMessage(content if content or not calls else None, calls, stream.malformed)

    def stream(self, tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = "auto") -> StreamingParser:
        """Create an incremental parser for one message. The arguments and errors are those of :meth:`parse`."""
        return StreamingParser(self, selectable_tools(tools, tool_choice))


def function_of(tool: Mapping[str, Any], where: str = "tools") -> Mapping[str, Any]:
    """Return the function of a tool. The tool is in OpenAI's format, or in the flat format ``{"name", "parameters"}``.

    Raises UsageError if ``tool`` is not a named function.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(
            f'{where}: {json.dumps(tool, default=str)} is not a function; use {{"type": "function", "function": '
            '{"name": ..., "parameters": ...}}'
        )
    return function


def selectable_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> dict[str, Mapping[str, Any]]:
    """Return a dict from name to function, with the functions that the model may call.

    Raises UsageError if a tool or ``tool_choice`` is invalid.
    """
    functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    by_name = {function["name"]: function for function in functions}
    if tool_choice is None or tool_choice in ("auto", "required"):
        return by_name
    if tool_choice == "none":
        return {}
    if not isinstance(tool_choice, Mapping):
        raise UsageError(
            f"tool_choice: {tool_choice!r} is unknown; use auto, none, required or "
            '{"type": "function", "function": {"name": ...}}'
        )
    name = function_of(tool_choice, "tool_choice")["name"]
    if name not in by_name:
        raise UsageError(f"tool_choice: there is no tool {name!r}; the tools are {', '.join(by_name) or 'none'}")
    return {name: by_name[name]}


@dataclass(slots=True)
class StreamingParser:
    """Incrementally splits one message into pieces of text and complete calls."""

    parser: ToolCallParser
    functions: dict[str, Mapping[str, Any]]
    malformed: int = 0  # number of malformed calls so far
    _source: GrowingText = field(default_factory=GrowingText)
    _at: int = 0  # the text before this position was parsed
    _pending: int = 0  # start of white space and wrappers before `_at`: emitted if text follows, dropped next to a call
    _scan: Scan | None = None
    _calls: int = 0
    _after_call: bool = False
    _text: list[str] = field(default_factory=list)
    _out: list[Delta] = field(default_factory=list)

    def push(self, text_piece: str) -> list[Delta]:
        """Append ``text_piece`` to the message, and return the new deltas.

        Text that may belong to an incomplete call is not returned yet.
        """
        if not self.functions:
            return [ContentDelta(text_piece)] if text_piece else []
        self._source.append(text_piece)
        self._parse(final=False)
        return self._take()

    def finish(self) -> list[Delta]:
        """Return the remaining deltas of the message. Most formats accept a call that lacks only its closing marker."""
        self._parse(final=True)
        if not self._after_call:
            self._emit_text(self._at)
        return self._take()

    def _parse(self, final: bool) -> None:
        length = len(self._source.text)
        while self._at < length:
            if self._scan is not None:
                result = self._scan(self._source, final)
                if result is None:
                    return
                if result.items:
                    self._emit_items(result)
                    self._pending = result.end
                self._at, self._scan = result.end, None
                continue
            markers: list[tuple[str, CallFormat | None]] = [(marker, None) for marker in self.parser.wrappers]
            markers += [(opener, form) for form in self.parser.formats for opener in form.openers]
            hits = [(start, *one) for one in markers if (start := self._source.find(one[0], self._at)) >= 0]
            if not hits:
                # Hold back the longest suffix that may be the start of a marker.
                held_back = 0 if final else longest_marker_start(self._source.text, self.parser.markers, self._at)
                self._advance(length - held_back)
                return
            start, marker, form = min(hits, key=itemgetter(0))
            self._advance(start)
            if form is None:
                self._at += len(marker)
                if self._after_call:
                    self._pending = self._at
            else:
                self._scan = form.scanner(start)

    def _emit_items(self, result: ScanResult) -> None:
        arguments = [self._arguments(item) for item in result.items]
        invalid = [item for item, json_text in zip(result.items, arguments, strict=True) if json_text is None]
        self.malformed += sum(not isinstance(item, PlainText) for item in invalid)
        if len(invalid) == len(arguments):
            self._emit_text(result.end)
            return
        for item, json_text in zip(result.items, arguments, strict=True):
            if json_text is None or not isinstance(item, RawCall):
                self._emit_text(self._at, item.source)
                continue
            self._pending = self._at
            self._after_call = True
            self._flush_text()
            self._out.append(ToolCallDelta(self._calls, f"call_{uuid.uuid4().hex[:24]}", item.name, json_text))
            self._calls += 1

    def _arguments(self, call: RawCall | Malformed | PlainText) -> str | None:
        function = self.functions.get(call.name) if isinstance(call, RawCall) else None
        if function is None or not isinstance(call, RawCall):
            return None
        arguments = typed_arguments(call.arguments, function.get("parameters")) if call.untyped else call.arguments
        return compact_json(arguments)

    def _advance(self, end: int) -> None:
        """Consume the text up to the position ``end``. Emit this text unless the text is blank.

        The text must not contain a call.
        """
        text = self._source.text[self._at : end]
        blank = f"{_WHITE_SPACE}{self.parser.separators}" if self._after_call else _WHITE_SPACE
        if text.strip(blank):
            self._emit_text(self._at + len(text.rstrip(_WHITE_SPACE)))
        self._at = end

    def _emit_text(self, end: int, suffix: str = "") -> None:
        text = self._source.text[self._pending : end] + suffix
        self._pending = end
        if text:
            self._after_call = False
            self._text.append(text)

    def _flush_text(self) -> None:
        if self._text:
            self._out.append(ContentDelta("".join(self._text)))
            self._text = []

    def _take(self) -> list[Delta]:
        self._flush_text()
        deltas, self._out = self._out, []
        return deltas


_WHITE_SPACE = " \t\r\n"


def longest_marker_start(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest suffix of ``text[start:]`` that is a proper prefix of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def compact_json(arguments: dict[str, Any]) -> str | None:
    """Return arguments as JSON text without spaces; None if JSON cannot express a value, such as an infinite number."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if any("\ud800" <= char <= "\udfff" for char in text):  # an unpaired surrogate cannot be sent as UTF-8
            text = json.dumps(arguments, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return text
