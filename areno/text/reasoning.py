"""Separate reasoning (``<think>...</think>`` and similar formats) from content, in complete or streamed messages.

If the generation prompt already ends with the opening marker, the message starts inside the reasoning. Reasoning is
recognized only at the start of a message. Markers after the reasoning are treated as content. In gpt-oss's format, any part
of a message may be reasoning.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from areno.errors import UsageError
from areno.text.chat import render_generation_prompt, template_source
from areno.text.growing import GrowingText
from areno.text.tool_calls.block_scanner import MAX_HEADER
from areno.text.tool_calls.json_span import skip_blank
from areno.text.tool_calls.parser import ContentDelta, longest_marker_start

_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning text."""

    text: str


ReasoningOrContent = ReasoningDelta | ContentDelta


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Splits messages into reasoning and content, for one reasoning format."""

    name: str  # as in ``--reasoning-parser``
    opener: str = ""  # opening marker; empty for formats without markers
    closer: str = ""  # closing marker
    starts_inside: bool = False  # whether the prompt ends with the opening marker

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers around reasoning, such as ``</think>``. Decoding must not remove markers that are special tokens."""
        if self.name == "harmony":
            return (*_HEADER_STARTS, _MESSAGE, *_BODY_ENDS)
        return (self.opener, self.closer) if self.opener else ()

    def after_prompt(self, prompt: str) -> ReasoningParser:
        """Return a copy of this parser for the response to a rendered prompt.

        If the prompt ends with ``opener``, the response starts inside the reasoning.
        """
        inside = bool(self.opener) and prompt.rstrip().endswith(self.opener)
        return dataclasses.replace(self, starts_inside=inside)

    def parse(self, text: str) -> tuple[str | None, str]:
        """Split a complete message into reasoning and content. The first value is None if there is no reasoning."""
        stream = self.stream()
        reasoning = content = ""
        for delta in stream.push(text) + stream.finish():
            if isinstance(delta, ReasoningDelta):
                reasoning += delta.text
            else:
                content += delta.text
        return reasoning or None, content

    def stream(self) -> ReasoningStream:
        """Create an incremental parser for one message."""
        if self.name == "harmony":
            return _HarmonyStream()
        return _MarkerStream(self)


@dataclass(slots=True)
class _MarkerStream:
    """Parses a message in four states: ``start``, ``reasoning``, ``gap`` and ``content``.

    In the state ``start``, all text so far is white space. The state ``gap`` covers the white space after the
    reasoning.
    """

    parser: ReasoningParser
    state: str = field(init=False)
    _source: GrowingText = field(default_factory=GrowingText)
    _at: int = 0  # the text before this position was emitted or skipped
    _scanned: int = 0  # the text before this position was scanned
    _started: bool = False  # whether some reasoning was emitted

    def __post_init__(self) -> None:
        self.state = "start" if self.parser.opener else "content"

    def finish(self) -> list[ReasoningOrContent]:
        return self.push("", final=True)  # incomplete reasoning is still reasoning

    def push(self, text_piece: str, final: bool = False) -> list[ReasoningOrContent]:
        self._source.append(text_piece)
        text = self._source.text
        out: list[ReasoningOrContent] = []
        if self.state == "start":
            self._start(text, final)
        if self.state == "reasoning":
            self._reasoning(text, out, final)
        if self.state == "gap":
            self._at = skip_blank(text, self._at)
            self.state = "content" if self._at < len(text) else "gap"
        if self.state == "content" and self._at < len(text):
            out.append(ContentDelta(text[self._at :]))
            self._at = len(text)
        return out

    def _start(self, text: str, final: bool) -> None:
        opener = self.parser.opener
        self._scanned = skip_blank(text, self._scanned)
        prefix = text[self._scanned : self._scanned + len(opener)]
        if prefix == opener:
            self._at = self._scanned = self._scanned + len(opener)
            self.state = "reasoning"
        elif final or not opener.startswith(prefix):
            self.state = "reasoning" if self.parser.starts_inside else "content"

    def _reasoning(self, text: str, out: list[ReasoningOrContent], final: bool) -> None:
        closer = self.parser.closer
        close = self._source.find(closer, self._at)
        held_back = 0 if final else longest_marker_start(text, (closer,), self._at)
        end = close if close >= 0 else len(text) - held_back
        if not self._started:
            self._at = min(skip_blank(text, self._at), end)
        start = max(self._at, self._scanned)
        new = text[start:end].rstrip(_WHITE_SPACE)  # trailing white space is emitted only if more text follows
        self._scanned = end
        if new:
            out.append(ReasoningDelta(text[self._at : start + len(new)]))
            self._at, self._started = start + len(new), True
        if close >= 0:
            self._at, self.state = close + len(closer), "gap"
        elif final:
            self._at = len(text)


_HEADER_STARTS = ("<|start|>", "<|channel|>")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(slots=True)
class _HarmonyStream:
    """Parses gpt-oss messages, which consist of one or more parts.

    A part that is addressed to a tool is a call. Any other part is reasoning if its channel is ``analysis``; otherwise, the
    part is content. Calls are normalized to ``<|channel|>commentary to=NAME<|message|>{...}<|call|>`` for the tool-call parser.
    """

    _source: GrowingText = field(default_factory=GrowingText)
    _at: int = 0  # the text before this position was parsed
    _channel: str | None = None  # channel of the part whose body is being parsed; None if a header may follow
    _channels: set[str] = field(default_factory=set)

    def push(self, text_piece: str) -> list[ReasoningOrContent]:
        self._source.append(text_piece)
        out: list[ReasoningOrContent] = []
        while self._at < len(self._source.text) and self._step(out):
            pass
        return out

    def finish(self) -> list[ReasoningOrContent]:
        out = self.push("")
        text = self._source.text
        in_header = self._channel is None and text.startswith(_HEADER_STARTS, self._at)
        if not in_header or len(text) - self._at > MAX_HEADER:  # a short, truncated header is not text
            self._emit(out, len(text))
        if self._channel == "call":
            out.append(ContentDelta(_BODY_ENDS[-1]))
        return out

    def _step(self, out: list[ReasoningOrContent]) -> bool:
        if self._channel is None:
            return self._header(out)
        markers = _BODY_ENDS + _HEADER_STARTS
        hits = [(position, end) for end in markers if (position := self._source.find(end, self._at)) >= 0]
        if not hits:
            text = self._source.text
            self._emit(out, len(text) - longest_marker_start(text, markers, self._at))
            return False
        position, end = min(hits)
        self._emit(out, position)
        if self._channel == "call":
            out.append(ContentDelta(_BODY_ENDS[-1]))
        self._at += len(end) if end in _BODY_ENDS else 0
        self._channel = None
        return True

    def _header(self, out: list[ReasoningOrContent]) -> bool:
        text = self._source.text
        if not text.startswith(_HEADER_STARTS, self._at):
            prefix = text[self._at : self._at + max(map(len, _HEADER_STARTS))]
            if any(start.startswith(prefix) for start in _HEADER_STARTS):
                return False
            self._channel = "final"  # text without a header
            return True
        end = self._source.find(_MESSAGE, self._at)
        if end < 0:
            return False
        header, self._at = text[self._at : end], end + len(_MESSAGE)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient:
            out.append(ContentDelta(f"<|channel|>commentary to={recipient[1]}{_MESSAGE}"))
        self._channel = "call" if recipient else channel[1] if channel else "final"
        if self._channel == "analysis" and "analysis" in self._channels:
            out.append(ReasoningDelta("\n"))
        self._channels.add(self._channel)
        return True

    def _emit(self, out: list[ReasoningOrContent], end: int) -> None:
        text, self._at = self._source.text[self._at : end], end
        if text:
            out.append(ReasoningDelta(text) if self._channel == "analysis" else ContentDelta(text))


ReasoningStream = _MarkerStream | _HarmonyStream
"""An incremental parser.

``push`` appends a piece of the message, and returns the new deltas. Text that may belong to an incomplete marker is not
returned yet. ``finish`` ends the message, and returns the remaining deltas.
"""

_PARSERS = {
    parser.name: parser
    for parser in (
        ReasoningParser("none"),
        ReasoningParser("seed", "<seed:think>", "</seed:think>"),
        ReasoningParser("mistral", "[THINK]", "[/THINK]"),
        ReasoningParser("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningParser("kimi", "◁think▷", "◁/think▷"),
        ReasoningParser("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningParser("harmony"),
        ReasoningParser("think", "<think>", "</think>"),  # the last one, because its marker is the least specific
    )
}
_ALIASES = {
    **dict.fromkeys(("qwen3", "qwen3_thinking", "deepseek_r1", "deepseek_v3", "glm45"), "think"),
    **dict.fromkeys(("gpt_oss", "openai_gptoss"), "harmony"),
    "seed_oss": "seed",
    "magistral": "mistral",
}
_SIGNS = (
    *(("<|channel|>", "harmony"), ("<|channel>", "gemma4")),
    *((parser.opener, parser.name) for parser in _PARSERS.values() if parser.opener),
    ("</think>", "think"),
)


def list_reasoning_parsers() -> list[str]:
    """Return the values of ``--reasoning-parser``, except ``auto``."""
    return sorted({*_PARSERS, *_ALIASES})


def reasoning_parser_for(tokenizer: Any, name: str = "auto") -> ReasoningParser:
    """Return the parser of the reasoning format ``name``.

    ``auto`` detects the format from the chat template and the added tokens. Raises UsageError if the name is unknown.
    """
    key = _detect(tokenizer) if name == "auto" else name.replace("-", "_")
    parser = _PARSERS.get(_ALIASES.get(key, key))
    if parser is None:
        raise UsageError(
            f"--reasoning-parser {name} is unknown; use one of: auto, {', '.join(list_reasoning_parsers())}"
        )
    if not parser.opener:
        return parser
    try:
        return parser.after_prompt(render_generation_prompt(tokenizer, [{"role": "user", "content": "?"}]).text)
    except UsageError:  # the template needs other messages; `after_prompt` is called again with the actual prompt
        return parser


def _detect(tokenizer: Any) -> str:
    texts = (template_source(tokenizer), "\n".join(tokenizer.get_added_vocab()))
    return next((name for text in texts for sign, name in _SIGNS if sign in text), "none")
