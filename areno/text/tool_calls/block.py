"""A call between an opening and a closing marker, whatever its body looks like.

The closing marker only counts where the body is complete, so it may stand in an argument; a body that cannot be read
ends at the first closing marker, so that one bad call does not swallow the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areno.text.tool_calls.base import CallScanner, Malformed, Outcome, RawCall
from areno.text.tool_calls.json_span import JsonSpan, Verdict, call_of, load_arguments, load_json

_BLANK = re.compile(r"[ \t\r\n]*")
_MAX_HEADER = 256

Item = RawCall | Malformed


class Body(Protocol):
    """What stands between the markers.

    Attributes:
        at: end of the body, once it is closed.
    """

    at: int

    def read(self, text: str) -> Verdict:
        """Read on in the block's text, which may have grown; the verdict depends on the text alone."""
        ...

    def items(self, text: str, source: str) -> Sequence[Item]:
        """The calls of the closed body; ``source`` is the block's whole text."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """A format of marked blocks.

    Args:
        opener: begins a block.
        closers: any of them ends it; empty where the body itself says where it ends.
        make_body: given the place where the body begins, a fresh reader of it.
    """

    opener: str
    closers: tuple[str, ...]
    make_body: Callable[[int], Body]

    @property
    def openers(self) -> tuple[str, ...]:
        """The one opening marker."""
        return (self.opener,)

    def scanner(self) -> CallScanner:
        """A fresh scanner of one block."""
        return _BlockScanner(self, self.make_body(len(self.opener)))


@dataclass(slots=True)
class _BlockScanner:
    block: Block
    body: Body
    verdict: Verdict = "open"

    def scan(self, text: str, final: bool) -> Outcome | None:
        if self.verdict == "open":
            self.verdict = self.body.read(text)
        if self.verdict == "closed":
            return self._close(text, final)
        if self.verdict == "open" and not final:
            return None
        return self._give_up(text, final)

    def _close(self, text: str, final: bool) -> Outcome | None:
        if not self.block.closers:
            return self._done(text, self.body.at)
        place = _BLANK.match(text, self.body.at).end()  # type: ignore[union-attr]
        rest = text[place:]
        for closer in self.block.closers:
            if rest.startswith(closer):
                return self._done(text, place + len(closer))
        if any(closer.startswith(rest) for closer in self.block.closers):
            # The closing marker is under way; at the end of the text a complete body is enough.
            return self._done(text, len(text)) if final else None
        if rest.startswith(self.block.opener):
            return self._done(text, self.body.at)
        if self.block.opener.startswith(rest) and not final:
            return None
        return self._give_up(text, final)

    def _done(self, text: str, end: int) -> Outcome:
        return Outcome(end, self.body.items(text, text[:end]))

    def _give_up(self, text: str, final: bool) -> Outcome | None:
        start = len(self.block.opener)
        if not self.block.closers and self.verdict == "broken":
            return Outcome(start, [Malformed(self.block.opener)])
        ends = [place + len(closer) for closer in self.block.closers if (place := text.find(closer, start)) >= 0]
        following = text.find(self.block.opener, start)
        ends += [following] if following >= 0 else []
        if not ends and not final:
            return None
        end = min(ends, default=len(text))
        return Outcome(end, [Malformed(text[:end])])


@dataclass(slots=True)
class HeaderJson:
    """A body of a short header and a JSON object; the header may name the tool, otherwise the object does.

    Args:
        at: where the body begins.
        header: what the header looks like up to the brace; its first group that matched is the name of the tool.
    """

    at: int
    header: re.Pattern[str]
    _start: int = field(init=False)
    _brace: int = -1
    _span: JsonSpan | None = None

    def __post_init__(self) -> None:
        self._start = self.at

    def read(self, text: str) -> Verdict:
        """See :class:`Body`."""
        if self._span is None:
            self._brace = text.find("{", self._start)
            if (self._brace if self._brace >= 0 else len(text)) - self._start > _MAX_HEADER:
                return "broken"
            if self._brace < 0:
                return "open"
            if not self.header.fullmatch(text, self._start, self._brace):
                return "broken"
            self._span = JsonSpan(self._brace)
        verdict = self._span.read(text)
        self.at = self._span.at
        return verdict

    def items(self, text: str, source: str) -> Sequence[Item]:
        """See :class:`Body`."""
        matched = self.header.fullmatch(text, self._start, self._brace)
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
