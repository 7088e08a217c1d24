"""What a model thinks, apart from what it says: ``<think>...</think>`` and its relatives, whole or streamed.

Templates differ in who writes the opening marker: where the generation prompt already ends with it, the text begins inside
the reasoning. Only reasoning at the beginning of a message counts, later markers are part of the text.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from areno.errors import UsageError
from areno.text.chat import render_generation_prompt, template_source
from areno.text.growing import GrowingText
from areno.text.tool_calls.base import ContentDelta, longest_marker_start
from areno.text.tool_calls.json_span import skip_blank

_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A further piece of the reasoning."""

    text: str


ReasoningOrContent = ReasoningDelta | ContentDelta


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Splits messages of one format."""

    name: str  # what ``--reasoning-parser`` calls it
    opener: str = ""  # marker before the reasoning; empty: there is never any
    closer: str = ""  # marker after it
    starts_inside: bool = False  # the prompt has the opening marker already

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens among these must not be left out of the decoded text."""
        if self.name == "harmony":
            return (*_HEADER_STARTS, _MESSAGE, *_BODY_ENDS)
        return (self.opener, self.closer) if self.opener else ()

    def after_prompt(self, prompt: str) -> ReasoningParser:
        """The same parser for the answer to this rendered prompt, which may or may not open the reasoning itself."""
        inside = bool(self.opener) and prompt.rstrip().endswith(self.opener)
        return dataclasses.replace(self, starts_inside=inside)

    def parse(self, text: str) -> tuple[str | None, str]:
        """Reasoning (None: there is none) and content of a whole message."""
        stream = self.stream()
        reasoning = content = ""
        for delta in stream.push(text) + stream.finish():
            if isinstance(delta, ReasoningDelta):
                reasoning += delta.text
            else:
                content += delta.text
        return reasoning or None, content

    def stream(self) -> ReasoningStream:
        """The same for a message that arrives in pieces."""
        if self.name == "harmony":
            return _HarmonyStream()
        return _MarkerStream(self)


@dataclass(slots=True)
class _MarkerStream:
    """``where`` goes from start (only white space so far) over reasoning and gap (white space after it) to content."""

    parser: ReasoningParser
    where: str = field(init=False)
    _source: GrowingText = field(default_factory=GrowingText)
    _at: int = 0  # what is before was handed out or left out
    _seen: int = 0  # what is before was looked at
    _started: bool = False  # something of the reasoning was handed out

    def __post_init__(self) -> None:
        self.where = "start" if self.parser.opener else "content"

    def finish(self) -> list[ReasoningOrContent]:
        return self.push("", final=True)  # reasoning that was cut off stays reasoning

    def push(self, text_piece: str, final: bool = False) -> list[ReasoningOrContent]:
        self._source.append(text_piece)
        text = self._source.text
        out: list[ReasoningOrContent] = []
        if self.where == "start":
            self._start(text, final)
        if self.where == "reasoning":
            self._reasoning(text, out, final)
        if self.where == "gap":
            self._at = skip_blank(text, self._at)
            self.where = "content" if self._at < len(text) else "gap"
        if self.where == "content" and self._at < len(text):
            out.append(ContentDelta(text[self._at :]))
            self._at = len(text)
        return out

    def _start(self, text: str, final: bool) -> None:
        opener = self.parser.opener
        self._seen = skip_blank(text, self._seen)
        begun = text[self._seen : self._seen + len(opener)]
        if begun == opener:
            self._at = self._seen = self._seen + len(opener)
            self.where = "reasoning"
        elif final or not opener.startswith(begun):
            self.where = "reasoning" if self.parser.starts_inside else "content"

    def _reasoning(self, text: str, out: list[ReasoningOrContent], final: bool) -> None:
        closer = self.parser.closer
        close = self._source.find(closer, self._at)
        keep = 0 if final else longest_marker_start(text, (closer,), self._at)
        end = close if close >= 0 else len(text) - keep
        if not self._started:
            self._at = min(skip_blank(text, self._at), end)
        seen = max(self._at, self._seen)
        fresh = text[seen:end].rstrip(_WHITE_SPACE)  # white space before it was looked at already
        self._seen = end
        if fresh:
            said = seen + len(fresh)
            out.append(ReasoningDelta(text[self._at : said]))
            self._at, self._started = said, True
        if close >= 0:
            self._at, self.where = close + len(closer), "gap"
        elif final:
            self._at = len(text)


_HEADER_STARTS = ("<|start|>", "<|channel|>")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(slots=True)
class _HarmonyStream:
    """gpt-oss: a message is a row of parts with a channel each; analysis is reasoning, a part to a tool is a call.

    Calls come out in one form, ``<|channel|>commentary to=NAME<|message|>{...}<|call|>``, for the tool-call parser.
    """

    _source: GrowingText = field(default_factory=GrowingText)
    _at: int = 0  # what is before was read
    _channel: str | None = None  # of the part whose body is being read; None: a header may come
    _kinds: set[str] = field(default_factory=set)

    def push(self, text_piece: str) -> list[ReasoningOrContent]:
        self._source.append(text_piece)
        out: list[ReasoningOrContent] = []
        while self._at < len(self._source.text) and self._step(out):
            pass
        return out

    def finish(self) -> list[ReasoningOrContent]:
        out = self.push("")
        self._emit(out, len(self._source.text))
        if self._channel == "call":
            out.append(ContentDelta(_BODY_ENDS[-1]))
        return out

    def _step(self, out: list[ReasoningOrContent]) -> bool:
        if self._channel is None:
            return self._header(out)
        markers = _BODY_ENDS + _HEADER_STARTS
        hits = [(place, end) for end in markers if (place := self._source.find(end, self._at)) >= 0]
        if not hits:
            text = self._source.text
            self._emit(out, len(text) - longest_marker_start(text, markers, self._at))
            return False
        place, end = min(hits)
        self._emit(out, place)
        if self._channel == "call":
            out.append(ContentDelta(_BODY_ENDS[-1]))
        self._at += len(end) if end in _BODY_ENDS else 0
        self._channel = None
        return True

    def _header(self, out: list[ReasoningOrContent]) -> bool:
        text = self._source.text
        if not text.startswith(_HEADER_STARTS, self._at):
            begun = text[self._at : self._at + max(map(len, _HEADER_STARTS))]
            if any(start.startswith(begun) for start in _HEADER_STARTS):
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
        if self._channel == "analysis" and "analysis" in self._kinds:
            out.append(ReasoningDelta("\n"))
        self._kinds.add(self._channel)
        return True

    def _emit(self, out: list[ReasoningOrContent], end: int) -> None:
        text, self._at = self._source.text[self._at : end], end
        if text:
            out.append(ReasoningDelta(text) if self._channel == "analysis" else ContentDelta(text))


ReasoningStream = _MarkerStream | _HarmonyStream
"""One message that arrives in pieces: ``push`` returns what became certain with a piece, ``finish`` the rest."""

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
        ReasoningParser("think", "<think>", "</think>"),  # last, as the most general sign of a format
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
    """All names that ``--reasoning-parser`` takes, ``auto`` aside."""
    return sorted({*_PARSERS, *_ALIASES})


def reasoning_parser_for(tokenizer: Any, name: str = "auto") -> ReasoningParser:
    """The reasoning format of a model by name; ``auto``: by chat template and added tokens. Raises UsageError: unknown."""
    wanted = _detect(tokenizer) if name == "auto" else name.replace("-", "_")
    parser = _PARSERS.get(_ALIASES.get(wanted, wanted))
    if parser is None:
        raise UsageError(f"--reasoning-parser {name}: unknown; known are auto, {', '.join(list_reasoning_parsers())}")
    if not parser.opener:
        return parser
    try:
        return parser.after_prompt(render_generation_prompt(tokenizer, [{"role": "user", "content": "?"}]).text)
    except UsageError:  # a template that wants other messages; the caller's own prompt will tell
        return parser


def _detect(tokenizer: Any) -> str:
    texts = (template_source(tokenizer), "\n".join(tokenizer.get_added_vocab()))
    return next((found for text in texts for sign, found in _SIGNS if sign in text), "none")
