"""A call between an opening and a closing marker, whatever its body looks like; and the formats whose body is JSON.

The closing marker only counts where the body is complete, so it may stand in an argument; a body that cannot be read
ends at the first closing marker, so that one bad call does not swallow the next.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.text.growing import GrowingText
from areno.text.tool_calls.base import CallFormat, CallShape, Malformed, Outcome, RawCall, ToolCallParser
from areno.text.tool_calls.json_span import JsonSpan, Span, Verdict, call_of, load_arguments, load_json, skip_blank

MAX_HEADER = 256
"""Most characters of what stands before the arguments of a call, such as its name."""

Item = RawCall | Malformed


@dataclass(slots=True)
class Body(ABC):
    """What stands between the markers."""

    at: int  # beginning of the body; its end, once it is closed
    resume: int = field(init=False)  # where to look for the block's end if the body cannot be read

    def __post_init__(self) -> None:
        self.resume = self.at

    @abstractmethod
    def read(self, source: GrowingText) -> Verdict:
        """Read on in the text, which may have grown; the verdict depends on the text alone."""

    @abstractmethod
    def items(self, text: str, source: str) -> Sequence[Item]:
        """The calls of the closed body, at least one; ``source`` is the block's own part of ``text``."""


def block(opener: str, closers: tuple[str, ...], make_body: Callable[[int], Body]) -> CallFormat:
    """A format of marked blocks, which any of ``closers`` ends; without closers the body itself says where it ends."""
    return CallFormat(
        (opener,), lambda start: _BlockScanner(opener, closers, make_body(start + len(opener)), start).scan
    )


@dataclass(slots=True)
class _BlockScanner:
    opener: str
    closers: tuple[str, ...]
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
        text, opener, closers = source.text, self.opener, self.closers
        if not closers:
            return self._done(text, self.body.at)
        place = self._after = skip_blank(text, max(self._after, self.body.at))
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
        if not self.closers and self.verdict == "broken":
            return Outcome(self.start + len(self.opener), [Malformed(self.opener)])
        after = self.body.resume
        ends = [place + len(closer) for closer in self.closers if (place := source.find(closer, after)) >= 0]
        ends += [place for place in [source.find(self.opener, after)] if place >= 0]
        if not ends and not final:
            return None
        end = min(ends, default=len(source.text))
        return Outcome(end, [Malformed(source.text[self.start : end])])


@dataclass(slots=True)
class HeaderJson(Body):
    """A body of a short header and a JSON object; the header may name the tool, otherwise the object does."""

    header: re.Pattern[str]  # what is before the brace; its first group that matched is the name of the tool
    make_span: Callable[[int], Span] = JsonSpan
    load: Callable[[str], Any] = load_json
    _brace: int = -1
    _span: Span | None = None

    def read(self, source: GrowingText) -> Verdict:
        """See :class:`Body`."""
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
        """See :class:`Body`."""
        matched = self.header.fullmatch(text, self.resume, self._brace)
        name = next((group for group in matched.groups() if group), None) if matched else None
        try:
            value = self.load(text[self._brace : self.at])
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


def _headed(opener: str, closers: tuple[str, ...], header: str) -> CallFormat:
    pattern = re.compile(header)
    return block(opener, closers, lambda start: HeaderJson(start, pattern))


# Hermes: the JSON has the name. Qwen's and MiniCPM's formats are made of this one.
HERMES = ToolCallParser(
    "hermes",
    (_headed("<tool_call>", ("</tool_call>",), r"\s*"),),
    shape=CallShape('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>", separator="\n"),
)

# DeepSeek: V3 writes the kind, the separator, the name and a code fence; V3.1 the name, the separator and the bare object.
_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = _headed(
    _BEGIN,
    (_END, f"```{_END}", f"```\n{_END}"),
    rf"\s*function{_SEP}([^\s{{<]+)\s*+(?:```json)?\s*|\s*([^\s{{<]+){_SEP}\s*",
)
_V3_SHAPE = CallShape(
    before=f"{_BEGIN}function{_SEP}{{bare_name}}\n```json\n",
    after=f"\n```{_END}",
    begin=_ALL_BEGIN,
    separator="\n",
    end=_ALL_END,
)
_V31_SHAPE = CallShape(before=f"{_BEGIN}{{bare_name}}{_SEP}", after=_END, begin=_ALL_BEGIN, end=_ALL_END)
DEEPSEEK = ToolCallParser("deepseek", (_DEEPSEEK,), wrappers=(_ALL_BEGIN, _ALL_END), shape=_V3_SHAPE)
DEEPSEEK_V31 = ToolCallParser("deepseek_v31", (_DEEPSEEK,), wrappers=(_ALL_BEGIN, _ALL_END), shape=_V31_SHAPE)

_KIMI_HEADER = r"\s*(?:functions\.)?([^\s{<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
KIMI = ToolCallParser(
    "kimi",
    (_headed("<|tool_call_begin|>", ("<|tool_call_end|>",), _KIMI_HEADER),),
    wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)

# gpt-oss: a part of the message that is addressed to a tool; the reasoning parser brings every such part into this form.
_HARMONY_HEADER = r"\s*(?:functions\.)?([^\s{<]+)\s*+(?:<\|constrain\|>)?\s*+(?:json)?\s*<\|message\|>\s*"
HARMONY = ToolCallParser("harmony", (_headed("<|channel|>commentary to=", ("<|call|>",), _HARMONY_HEADER),))
