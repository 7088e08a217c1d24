"""Find tool calls between an opening and a closing marker, and parse calls whose body is JSON.

A closing marker ends a call only after a complete body, so an argument may contain the closing marker. A malformed body
ends at the first closing or opening marker, so a malformed call does not include the next call.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.text.growing import GrowingText
from areno.text.tool_calls.json_span import JsonSpan, ValueSpan, Verdict, call_of, load_arguments, load_json, skip_blank
from areno.text.tool_calls.parser import CallFormat, Malformed, RawCall, ScanResult

MAX_HEADER = 256
"""Maximum length in characters of a call's header, which is the text before the arguments, such as the tool's name."""

Item = RawCall | Malformed


@dataclass(slots=True)
class BlockBody(ABC):
    """The content of a block, between the opening and the closing marker."""

    at: int  # position up to which the body is parsed; its end once it is closed
    resume: int = field(init=False)  # where the search for the end of the block continues if the body is malformed

    def __post_init__(self) -> None:
        self.resume = self.at

    @abstractmethod
    def read(self, source: GrowingText) -> Verdict:
        """Continue parsing the text, which may have grown. The result does not depend on how the text was split into pieces."""

    @abstractmethod
    def items(self, text: str, source: str) -> Sequence[Item]:
        """Return the calls in this body. The result must not be empty. Called after :meth:`read` has found the end of the body.

        ``text`` is the message so far. ``source`` is the text of the whole block, with its markers.
        """


def block(opener: str, closers: tuple[str, ...], make_body: Callable[[int], BlockBody]) -> CallFormat:
    """Create a :class:`CallFormat` for blocks that start with ``opener`` and end with one of ``closers``.

    If ``closers`` is empty, blocks have no closing marker. A block then ends where :meth:`BlockBody.read` finds the end of the
    body.
    """
    return CallFormat(
        (opener,), lambda start: _BlockScanner(opener, closers, make_body(start + len(opener)), start).scan
    )


@dataclass(slots=True)
class _BlockScanner:
    opener: str
    closers: tuple[str, ...]
    body: BlockBody
    start: int
    verdict: Verdict = "open"
    _after: int = 0  # position after the white space that follows the body

    def scan(self, source: GrowingText, final: bool) -> ScanResult | None:
        if self.verdict == "open":
            self.verdict = self.body.read(source)
        if self.verdict == "closed":
            return self._close(source, final)
        if self.verdict == "open" and not final:
            return None
        return self._malformed(source, final)

    def _close(self, source: GrowingText, final: bool) -> ScanResult | None:
        text, opener, closers = source.text, self.opener, self.closers
        if not closers:
            return self._complete(text, self.body.at)
        start = self._after = skip_blank(text, max(self._after, self.body.at))
        for closer in closers:
            if text.startswith(closer, start):
                return self._complete(text, start + len(closer))
        rest = text[start : start + max(map(len, (*closers, opener)))]
        if any(closer.startswith(rest) for closer in closers):
            # The closing marker is incomplete; at the end of the message, a complete body is enough.
            return self._complete(text, len(text)) if final else None
        if rest.startswith(opener):
            return self._complete(text, self.body.at)
        if opener.startswith(rest) and not final:
            return None
        return self._malformed(source, final)

    def _complete(self, text: str, end: int) -> ScanResult:
        return ScanResult(end, self.body.items(text, text[self.start : end]))

    def _malformed(self, source: GrowingText, final: bool) -> ScanResult | None:
        if not self.closers and self.verdict == "broken":
            return ScanResult(self.start + len(self.opener), [Malformed(self.opener)])
        after = self.body.resume
        ends = [start + len(closer) for closer in self.closers if (start := source.find(closer, after)) >= 0]
        ends += [start for start in [source.find(self.opener, after)] if start >= 0]
        if not ends and not final:
            return None
        end = min(ends, default=len(source.text))
        return ScanResult(end, [Malformed(source.text[self.start : end])])


@dataclass(slots=True)
class HeaderJson(BlockBody):
    """A short header followed by a JSON object. The header or the object contains the tool's name."""

    header: re.Pattern[str]  # matches the text before the brace; the first group that matches is the tool's name
    make_span: Callable[[int], ValueSpan] = JsonSpan
    load: Callable[[str], Any] = load_json
    _brace: int = -1
    _span: ValueSpan | None = None

    def read(self, source: GrowingText) -> Verdict:
        """See :class:`BlockBody`."""
        text = source.text
        if self._span is None:
            self._brace = text.find("{", self.resume, self.resume + MAX_HEADER + 1)
            if self._brace < 0:
                return "open" if len(text) - self.resume <= MAX_HEADER else "broken"
            if not self.header.fullmatch(text, self.resume, self._brace):
                return "broken"
            self._span = self.make_span(self._brace)
        verdict = self._span.read(source)
        self.at = self._span.at
        return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        """See :class:`BlockBody`."""
        matched = self.header.fullmatch(text, self.resume, self._brace)
        name = next((group for group in matched.groups() if group), None) if matched else None
        try:
            value = self.load(text[self._brace : self.at])
        except ValueError:
            return [Malformed(source)]
        return [raw_call(source, value, name)]


def raw_call(source: str, value: Any, name: str | None = None) -> Item:
    """Create the call that a JSON value describes.

    With ``name``, the value contains only the arguments. Without ``name``, the value contains the name and the arguments.
    """
    if name is not None:
        arguments = load_arguments(value)
        return Malformed(source) if arguments is None else RawCall(name, arguments, source)
    call = call_of(value) if isinstance(value, Mapping) else None
    return Malformed(source) if call is None else RawCall(*call, source)


def headed_json(opener: str, closers: tuple[str, ...], header: str) -> CallFormat:
    """Create a :class:`CallFormat` for blocks that contain a header, followed by a JSON object.

    ``header`` is a regular expression for the header.
    """
    pattern = re.compile(header)
    return block(opener, closers, lambda start: HeaderJson(start, pattern))
