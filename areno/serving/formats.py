"""How a model writes reasoning and tool calls, and what keeps its answers inside a format."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from areno.serving.recording import Piece
from areno.serving.schemas import ResponseFormat
from areno.text import grammar
from areno.text.reasoning import ReasoningDelta, ReasoningParser, ReasoningStream, reasoning_parser_for
from areno.text.tool_calls import ContentDelta, StreamingParser, ToolCallDelta, ToolCallParser, parser_for
from areno.types import TokenConstraint

if TYPE_CHECKING:
    from areno.engine.backend import Backend

ConstraintMaker = Callable[[], TokenConstraint]


class Formats:
    """The formats of one model. Raises UsageError: a name is unknown."""

    def __init__(self, engine: Backend, tool_call_parser: str, reasoning_parser: str) -> None:
        self._engine = engine
        self._calls = parser_for(engine.tokenizer, tool_call_parser)
        self._reasoning = reasoning_parser_for(engine.tokenizer, reasoning_parser)
        tokenizer = engine.tokenizer
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}

    def expectation(
        self, prompt: str, tools: Sequence[dict[str, Any]], tool_choice: str | dict[str, Any], parallel: bool
    ) -> Expectation:
        """How the answer to a rendered prompt is to be read. Raises UsageError: tools or choice make no sense."""
        reasoning = self._reasoning.after_prompt(prompt)
        markers = (*reasoning.markers, *(self._calls.markers if tool_choice != "none" else ()))
        # A format without a pair of markers is made of special tokens altogether.
        structured = reasoning.name != "none" and not reasoning.opener
        special = structured or any(token in marker for marker in markers for token in self._special)
        expected = Expectation(reasoning, self._calls, tools, tool_choice, parallel, special)
        expected.reader()  # says what is wrong with the tools
        return expected

    def constraint(self, expected: Expectation, form: ResponseFormat | None) -> ConstraintMaker | None:
        """What the answer is held to; None where it is free. Raises UsageError: a schema is none, or no grammar can say it."""
        make = self._maker(expected, form)
        if make is None:
            return None
        inner, ends = self._with_reasoning(make, expected.reasoning), sorted(self._engine.eos_ids)
        return lambda: _Contained(inner(), self._engine.vocab_size, ends, expected.failures)

    def _with_reasoning(self, make: Callable[..., ConstraintMaker], reasoning: ReasoningParser) -> ConstraintMaker:
        """The constraint of the answer, before which the model may reason as its format has it."""
        if reasoning.starts_inside:
            return make(after=reasoning.closer)
        text = reasoning.opener
        ids = self._engine.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if len(ids) != 1:
            return make()
        silent, thinking = make(), make(after=reasoning.closer)
        return lambda: _MayThink(silent(), thinking, ids[0])

    def _maker(self, expected: Expectation, form: ResponseFormat | None) -> Callable[..., ConstraintMaker] | None:
        """Makes the constraint of the answer itself, from the marker ``after`` on where one is given."""
        tokenizer = self._engine.tokenizer
        options: dict[str, Any] = {"vocab_size": self._engine.vocab_size, "eos_ids": self._engine.eos_ids}
        if expected.tool_choice not in ("none", "auto"):
            options |= {"parallel": expected.parallel}
            what = (tokenizer, expected.calls, expected.tools, expected.tool_choice)
            return functools.partial(grammar.tool_call_constraint, *what, **options)
        if form is None or form.type == "text":
            return None
        if form.json_schema is None:
            return functools.partial(grammar.json_object_constraint, tokenizer, **options)
        return functools.partial(grammar.json_schema_constraint, tokenizer, form.json_schema.json_schema, **options)


class _Contained:
    """Keeps what goes wrong in one sample's grammar to that sample; in the engine it would end everybody's."""

    def __init__(self, inner: TokenConstraint, vocabulary: int, ends: Sequence[int], failures: list[str]) -> None:
        self._inner, self._failures, self._failed = inner, failures, False
        self._only_end = np.zeros(vocabulary, dtype=np.bool_)
        self._only_end[list(ends)] = True

    def allowed(self) -> np.ndarray | None:
        if not self._failed:
            try:
                mask = self._inner.allowed()
                if mask is None or mask.any():
                    return mask
                self._fail("no token of this model can continue the answer")
            except Exception as error:  # whatever it is, it is this sample's alone
                self._fail(str(error))
        return self._only_end

    def forces(self, token: int) -> bool:
        return self._failed or self._inner.forces(token)

    def push(self, token: int) -> None:
        try:
            if not self._failed:
                self._inner.push(token)
        except Exception as error:  # as above
            self._fail(str(error))

    @property
    def finished(self) -> bool:
        return self._failed or self._inner.finished

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._failures.append(reason)


class _MayThink:
    """A constraint for a model that reasons or not, as it likes: its first token decides."""

    def __init__(self, silent: TokenConstraint, thinking: ConstraintMaker, opener: int) -> None:
        self._chosen, self._thinking, self._opener = silent, thinking, opener
        self._begun = False

    def allowed(self) -> np.ndarray | None:
        mask = self._chosen.allowed()
        if self._begun or mask is None:
            return mask
        mask = mask.copy()
        mask[self._opener] = True
        return mask

    def forces(self, token: int) -> bool:
        return self._begun and self._chosen.forces(token)

    def push(self, token: int) -> None:
        if not self._begun and token == self._opener:
            self._chosen = self._thinking()
        self._begun = True
        self._chosen.push(token)

    @property
    def finished(self) -> bool:
        return self._chosen.finished


@dataclass(frozen=True, slots=True)
class Expectation:
    """How one request's answers are read; see :meth:`Formats.expectation`."""

    reasoning: ReasoningParser
    calls: ToolCallParser
    tools: Sequence[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel: bool
    needs_special_tokens: bool  # markers are special tokens, so the text must have them
    failures: list[str] = field(default_factory=list)  # what has gone wrong in the grammars of the samples

    def reader(self) -> MessageReader:
        """A fresh reader of one message."""
        return MessageReader(self.reasoning.stream(), self.calls.stream(self.tools, self.tool_choice), self.parallel)


@dataclass(slots=True)
class MessageReader:
    """Splits the text of one message into reasoning, content and calls while it comes in."""

    _reasoning: ReasoningStream
    calls: StreamingParser
    _parallel: bool
    _called: bool = field(default=False, init=False)

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what became certain."""
        return self._read(self._reasoning.push(text)) if text else []

    def finish(self) -> list[Piece]:
        """The rest at the end of the message."""
        return self._read(self._reasoning.finish()) + self._kept(self.calls.finish())

    def _read(self, pieces: Sequence[ReasoningDelta | ContentDelta]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += [piece] if isinstance(piece, ReasoningDelta) else self._kept(self.calls.push(piece.text))
        return found

    def _kept(self, pieces: Sequence[ContentDelta | ToolCallDelta]) -> list[Piece]:
        """All pieces; without parallel calls nothing of a second one."""
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                if self._called and not self._parallel:
                    continue
                self._called = True
            kept.append(piece)
        return kept
