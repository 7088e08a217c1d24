"""What every tool-call format shares: the message that comes out, and the walk through text that may arrive in pieces.

A format knows how one call looks from its opening marker on (:class:`CallFormat`); the walk here
finds the markers, hands out the text between them, and decides whether a call counts. A call is handed out once it is
complete and known to be good, never before: only so can a malformed one stay text. Parsing a whole text is streaming it
in one piece, so both always agree.
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
    """One call of a tool; ``arguments`` is compact JSON text of an object, as OpenAI clients expect it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """What a model said: text, calls, or both."""

    content: str | None  # the text; None where there is none beside calls
    tool_calls: list[ToolCall]  # the calls in their order
    malformed: int  # calls that could not be read or name an unknown tool; they are part of the text


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A further piece of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A further piece of the call number ``index``; ``id`` and ``name`` come with its first piece only."""

    index: int
    id: str | None
    name: str | None
    arguments_piece: str


Delta = ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as the text has it."""

    name: str  # the tool
    arguments: dict[str, Any]  # by name; only of type str where ``untyped``
    source: str  # the piece of text that it was read from, which is what remains of it should it be refused
    untyped: bool = False  # the format writes all values as text, so the tool's schema must say what they are


@dataclass(frozen=True, slots=True)
class Malformed:
    """A piece of text that was meant to be a call; it stays text and is counted."""

    source: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """A piece of text that only looked like the beginning of a call."""

    source: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scanner found: the text from its opening marker up to ``end`` stands for ``items``.

    Without items it was a mere wrapper of calls, which vanishes beside a call and stays where text follows.
    """

    end: int
    items: Sequence[RawCall | Malformed | PlainText]


Scan = Callable[[GrowingText, bool], Outcome | None]
"""Reads one call, or one block of calls, from its opening marker on.

It is given the message so far, each time the same one or a longer one, and whether no more will come. It returns None if it
takes more text to know (never where no more comes); the outcome depends on the text alone, not on how it arrived. A message
may have any number of opening markers, and the text after each may be read in vain up to where another one could begin: so
it must take time in proportion to what it reads, go on where it stopped, look for markers by :meth:`GrowingText.find`, and
not read far beyond the text that its outcome stands for.
"""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    openers: tuple[str, ...]  # the markers that a call begins with; none of them is part of another
    scanner: Callable[[int], Scan]  # a fresh scanner of the block whose opening marker is at this place


@dataclass(frozen=True, slots=True)
class CallShape:
    r"""How calls are written out; grammars that force a call are made of it.

    The text is ``begin``, then calls with ``separator`` between them, then ``end``. A call is ``before`` (in which
    ``{name}`` stands for the tool as a JSON string, ``{bare_name}`` for its mere name), the arguments, and ``after``. The
    arguments are one JSON object; or, with ``argument_before`` (``{key}`` stands for the argument) and
    ``argument_after``, each on its own between the two: strings as they are, other values as JSON.
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
    """A named set of formats; made once, used for any number of messages."""

    name: str  # what ``--tool-call-parser`` calls it
    formats: tuple[CallFormat, ...]  # the ways in which the model writes calls
    wrappers: tuple[str, ...] = ()  # markers around calls that mean nothing on their own
    separators: str = ""  # characters besides white space that may stand between two calls
    shape: CallShape | None = None  # how to write a call, for grammars; None where they cannot say it

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings that begin something; special tokens among them must not be left out of the decoded text."""
        return tuple(opener for form in self.formats for opener in form.openers) + self.wrappers

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = "auto") -> ParsedMessage:
        """Split a whole message into text and calls.

        ``tools`` are in OpenAI's form or flat (``{"name", "parameters"}``); ``tool_choice`` is ``auto``, ``none`` (nothing is
        parsed), ``required``, or the one tool that may be called. Raises UsageError: they make no sense; names the entry.
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
        """The same for a message that arrives in pieces; arguments and errors as in :meth:`parse`."""
        return StreamingParser(self, selectable_tools(tools, tool_choice))


def function_of(tool: Mapping[str, Any], where: str = "tools") -> Mapping[str, Any]:
    """The function part of a tool in OpenAI's form or in the flat one. Raises UsageError: it has no name, or is no function."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(
            f'{where}: {json.dumps(tool, default=str)} is not a function; give {{"type": "function", "function": '
            '{"name": ..., "parameters": ...}}'
        )
    return function


def selectable_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> dict[str, Mapping[str, Any]]:
    """The functions that may be called, by name. Raises UsageError: a tool is no function, or ``tool_choice`` no choice."""
    functions = [function_of(tool, f"tools[{place}]") for place, tool in enumerate(tools or [])]
    by_name = {function["name"]: function for function in functions}
    if tool_choice is None or tool_choice in ("auto", "required"):
        return by_name
    if tool_choice == "none":
        return {}
    if not isinstance(tool_choice, Mapping):
        raise UsageError(
            f"tool_choice: {tool_choice!r} is unknown; give auto, none, required or "
            '{"type": "function", "function": {"name": ...}}'
        )
    name = function_of(tool_choice, "tool_choice")["name"]
    if name not in by_name:
        raise UsageError(f"tool_choice: there is no tool {name!r}; the tools are {', '.join(by_name) or 'none'}")
    return {name: by_name[name]}


@dataclass(slots=True)
class StreamingParser:
    """Turns pieces of one message into pieces of text and complete calls."""

    parser: ToolCallParser
    functions: dict[str, Mapping[str, Any]]
    malformed: int = 0  # how many calls stayed text so far
    _source: GrowingText = field(default_factory=GrowingText)
    _at: int = 0  # what is before has been read
    _unsaid: int = 0  # from here to there are white space and wrappers: text if text follows, nothing beside a call
    _scan: Scan | None = None
    _calls: int = 0
    _after_call: bool = False
    _said: list[str] = field(default_factory=list)
    _out: list[Delta] = field(default_factory=list)

    def push(self, text_piece: str) -> list[Delta]:
        """Add text; returns what became certain with it."""
        if not self.functions:
            return [ContentDelta(text_piece)] if text_piece else []
        self._source.append(text_piece)
        self._walk(final=False)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest at the end of the message: what was held back, and calls that are complete without a closing marker."""
        self._walk(final=True)
        if not self._after_call:
            self._say(self._at)
        return self._take()

    def _walk(self, final: bool) -> None:
        length = len(self._source.text)
        while self._at < length:
            if self._scan is not None:
                outcome = self._scan(self._source, final)
                if outcome is None:
                    return
                if outcome.items:
                    self._take_items(outcome)
                    self._unsaid = outcome.end
                self._at, self._scan = outcome.end, None
                continue
            markers: list[tuple[str, CallFormat | None]] = [(marker, None) for marker in self.parser.wrappers]
            markers += [(opener, form) for form in self.parser.formats for opener in form.openers]
            hits = [(place, *one) for one in markers if (place := self._source.find(one[0], self._at)) >= 0]
            if not hits:
                # The longest end of the text that may grow into a marker is left for later.
                keep = 0 if final else longest_marker_start(self._source.text, self.parser.markers, self._at)
                self._prose(length - keep)
                return
            place, marker, form = min(hits, key=itemgetter(0))
            self._prose(place)
            if form is None:
                self._at += len(marker)
            else:
                self._scan = form.scanner(place)

    def _take_items(self, outcome: Outcome) -> None:
        arguments = [self._arguments(item) for item in outcome.items]
        bad = [item for item, found in zip(outcome.items, arguments, strict=True) if found is None]
        self.malformed += sum(not isinstance(item, PlainText) for item in bad)
        if len(bad) == len(arguments):
            self._say(outcome.end)
            return
        for item, found in zip(outcome.items, arguments, strict=True):
            if found is None or not isinstance(item, RawCall):
                self._say(self._at, item.source)
                continue
            self._unsaid = self._at
            self._after_call = True
            self._end_text()
            self._out.append(ToolCallDelta(self._calls, f"call_{uuid.uuid4().hex[:24]}", item.name, found))
            self._calls += 1

    def _arguments(self, call: RawCall | Malformed | PlainText) -> str | None:
        """JSON text of a call's arguments; None where the item is no call of a tool that may be called."""
        function = self.functions.get(call.name) if isinstance(call, RawCall) else None
        if function is None or not isinstance(call, RawCall):
            return None
        arguments = typed_arguments(call.arguments, function.get("parameters")) if call.untyped else call.arguments
        return compact_json(arguments)

    def _prose(self, end: int) -> None:
        text = self._source.text[self._at : end]
        blank = f"{_WHITE_SPACE}{self.parser.separators}" if self._after_call else _WHITE_SPACE
        if text.strip(blank):
            self._say(self._at + len(text.rstrip(_WHITE_SPACE)))
        self._at = end

    def _say(self, end: int, more: str = "") -> None:
        """Hand out the text up to ``end`` that has not been, and what takes the place of what follows."""
        text = self._source.text[self._unsaid : end] + more
        self._unsaid = end
        if text:
            self._after_call = False
            self._said.append(text)

    def _end_text(self) -> None:
        if self._said:
            self._out.append(ContentDelta("".join(self._said)))
            self._said = []

    def _take(self) -> list[Delta]:
        self._end_text()
        taken, self._out = self._out, []
        return taken


_WHITE_SPACE = " \t\r\n"


def longest_marker_start(text: str, markers: Sequence[str], start: int = 0) -> int:
    """How many characters at the end of a text, from ``start`` on, may be the beginning of one of the markers."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def compact_json(arguments: dict[str, Any]) -> str | None:
    """JSON text without spaces; None where the values have no JSON form (infinite numbers, sets, endless nesting)."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if any("\ud800" <= char <= "\udfff" for char in text):  # half a surrogate pair cannot be sent as UTF-8
            text = json.dumps(arguments, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return text
