"""A call between an opening and a closing marker, whatever its body looks like.

The closing marker only counts where the body is complete, so it may stand in an argument; a body that cannot be read
ends at the first closing marker, so that one bad call does not swallow the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areno.text.growing import GrowingText
from areno.text.tool_calls.base import CallScanner, Malformed, Outcome, RawCall
from areno.text.tool_calls.json_span import JsonSpan, Verdict, call_of, load_arguments, load_json

_BLANK = re.compile(r"[ \t\r\n]*")
MAX_HEADER = 256
"""Most characters of what stands before the arguments of a call, such as its name."""

Item = RawCall | Malformed


class Body(Protocol):
    """What stands between the markers."""

    at: int  # end of the body, once it is closed
    resume: int  # where to look for the block's end if the body cannot be read; what is before is part of it

    def read(self, source: GrowingText) -> Verdict:
        """Read on in the text, which may have grown; the verdict depends on the text alone."""

    def items(self, text: str, source: str) -> Sequence[Item]:
        """The calls of the closed body, at least one; ``source`` is the block's own part of ``text``."""


@dataclass(frozen=True, slots=True)
class Block:
    """A format of marked blocks."""

    opener: str  # begins a block
    closers: tuple[str, ...]  # any of them ends it; empty where the body itself says where it ends
    make_body: Callable[[int], Body]  # given the place where the body begins, a fresh reader of it

    @property
    def openers(self) -> tuple[str, ...]:
        """The one opening marker."""
        return (self.opener,)

    def scanner(self, start: int) -> CallScanner:
        """A fresh scanner of one block."""
        return _BlockScanner(self, self.make_body(start + len(self.opener)), start)


@dataclass(slots=True)
class _BlockScanner:
    block: Block
    body: Body
    start: int
    verdict: Verdict = "open"
    _after: int = 0  # behind the white space that follows the body

    def scan(self, source: GrowingText, final: bool) -> Outcome | None:
        if self.verdict == "open":
            self.verdict = self.body.read(source)
        if self.verdict == "closed":
            return self._close(source, final)
        if self.verdict == "open" and not final:
            return None
        return self._give_up(source, final)

    def _close(self, source: GrowingText, final: bool) -> Outcome | None:
        text, opener, closers = source.text, self.block.opener, self.block.closers
        if not closers:
            return self._done(text, self.body.at)
        place = self._after = _BLANK.match(text, max(self._after, self.body.at)).end()  # type: ignore[union-attr]
        for closer in closers:
            if text.startswith(closer, place):
                return self._done(text, place + len(closer))
        rest = text[place : place + max(map(len, (*closers, opener)))]
        if any(closer.startswith(rest) for closer in closers):
            # The closing marker is under way; at the end of the text a complete body is enough.
            return self._done(text, len(text)) if final else None
        if rest.startswith(opener):
            return self._done(text, self.body.at)
        if opener.startswith(rest) and not final:
            return None
        return self._give_up(source, final)

    def _done(self, text: str, end: int) -> Outcome:
        return Outcome(end, self.body.items(text, text[self.start : end]))

    def _give_up(self, source: GrowingText, final: bool) -> Outcome | None:
        if not self.block.closers and self.verdict == "broken":
            return Outcome(self.start + len(self.block.opener), [Malformed(self.block.opener)])
        ends = [
            place + len(closer)
            for closer in self.block.closers
            if (place := source.find(closer, self.body.resume)) >= 0
        ]
        following = source.find(self.block.opener, self.body.resume)
        ends += [following] if following >= 0 else []
        if not ends and not final:
            return None
        end = min(ends, default=len(source.text))
        return Outcome(end, [Malformed(source.text[self.start : end])])


@dataclass(slots=True)
class HeaderJson:
    """A body of a short header and a JSON object; the header may name the tool, otherwise the object does."""

    at: int  # where the body begins
    header: re.Pattern[
        str
    ]  # what the header looks like up to the brace; its first group that matched is the name of the tool
    resume: int = field(init=False)
    _brace: int = -1
    _span: JsonSpan | None = None

    def __post_init__(self) -> None:
        self.resume = self.at

    def read(self, source: GrowingText) -> Verdict:
        """See :class:`Body`."""
        text = source.text
        if self._span is None:
            self._brace = text.find("{", self.resume, self.resume + MAX_HEADER + 1)
            if self._brace < 0:
                return "open" if len(text) - self.resume <= MAX_HEADER else "broken"
            if not self.header.fullmatch(text, self.resume, self._brace):
                return "broken"
            self._span = JsonSpan(self._brace)
        verdict = self._span.read(text)
        self.at = self._span.at
        return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        """See :class:`Body`."""
        matched = self.header.fullmatch(text, self.resume, self._brace)
        name = next((group for group in matched.groups() if group), None) if matched else None
        try:
            value = load_json(text[self._brace : self.at])
        except ValueError:
            return [Malformed(source)]
        return [raw_call(source, value, name)]


def raw_call(source: str, value: Any, name: str | None = None) -> Item:
    """The call that a JSON value describes: its arguments where ``name`` is known, otherwise name and arguments."""
    if name is not None:
        arguments = load_arguments(value)
        return Malformed(source) if arguments is None else RawCall(name, arguments, source)
    call = call_of(value) if isinstance(value, Mapping) else None
    return Malformed(source) if call is None else RawCall(*call, source)
