"""The reasoning and tool-call formats of a model, and the grammars that constrain its responses."""

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
    """The formats of one model. Raises UsageError if the name of a format is unknown."""

    def __init__(self, engine: Backend, tool_call_parser: str, reasoning_parser: str) -> None:
        self._engine = engine
        self._calls = parser_for(engine.tokenizer, tool_call_parser)
        self._reasoning = reasoning_parser_for(engine.tokenizer, reasoning_parser)
        tokenizer = engine.tokenizer
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}

    def expectation(
        self, prompt: str, tools: Sequence[dict[str, Any]], tool_choice: str | dict[str, Any], parallel: bool
    ) -> Expectation:
        """Return how to parse the response to a rendered prompt. Raises UsageError if a tool or ``tool_choice`` is invalid."""
        reasoning = self._reasoning.after_prompt(prompt)
        markers = (*reasoning.markers, *(self._calls.markers if tool_choice != "none" else ()))
        # A reasoning format without an opening marker (harmony) uses special tokens.
        structured = reasoning.name != "none" and not reasoning.opener
        special = structured or any(token in marker for marker in markers for token in self._special)
        expected = Expectation(reasoning, self._calls, tools, tool_choice, parallel, special)
        expected.reader()  # validates the tools
        return expected

    def constraint(self, expected: Expectation, form: ResponseFormat | None) -> ConstraintMaker | None:
        """Return a factory of the response's grammar, if any. Raises UsageError if a schema is invalid or unsupported."""
        make = self._maker(expected, form)
        if make is None:
            return None
        inner, ends = self._with_reasoning(make, expected.reasoning), sorted(self._engine.eos_ids)
        return lambda: _IsolatedConstraint(inner(), self._engine.vocab_size, ends, expected.failures)

    def _with_reasoning(self, make: Callable[..., ConstraintMaker], reasoning: ReasoningParser) -> ConstraintMaker:
        """Extend a constraint, so that reasoning may precede the constrained response."""
        if reasoning.starts_inside:
            return make(after=reasoning.closer)
        text = reasoning.opener
        ids = self._engine.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if len(ids) != 1:
            return make()
        direct, after_reasoning = make(), make(after=reasoning.closer)
        return lambda: _OptionalReasoning(direct(), after_reasoning, ids[0])

    def _maker(self, expected: Expectation, form: ResponseFormat | None) -> Callable[..., ConstraintMaker] | None:
        """Return a function that creates the factory. Its argument ``after`` is a marker after which the constraint applies."""
        tokenizer = self._engine.tokenizer
        options: dict[str, Any] = {"vocab_size": self._engine.vocab_size, "eos_ids": self._engine.eos_ids}
        if expected.tool_choice not in ("none", "auto"):
            options |= {"parallel": expected.parallel}
            arguments = (tokenizer, expected.calls, expected.tools, expected.tool_choice)
            return functools.partial(grammar.tool_call_constraint, *arguments, **options)
        if form is None or form.type == "text":
            return None
        if form.json_schema is None:
            return functools.partial(grammar.json_object_constraint, tokenizer, **options)
        return functools.partial(grammar.json_schema_constraint, tokenizer, form.json_schema.json_schema, **options)


class _IsolatedConstraint:
    """Ends only the sample whose grammar fails, because an exception in the engine's thread would end all samples."""

    def __init__(self, inner: TokenConstraint, vocabulary: int, eos_ids: Sequence[int], failures: list[str]) -> None:
        self._inner, self._failures, self._failed = inner, failures, False
        self._eos_only = np.zeros(vocabulary, dtype=np.bool_)
        self._eos_only[list(eos_ids)] = True

    def allowed(self) -> np.ndarray | None:
        if not self._failed:
            try:
                mask = self._inner.allowed()
                if mask is None or mask.any():
                    return mask
                self._fail("no token of this model can continue the response")
            except Exception as error:  # no failure may affect other samples
                self._fail(str(error))
        return self._eos_only

    def forces(self, token: int) -> bool:
        return self._failed or self._inner.forces(token)

    def push(self, token: int) -> None:
        try:
            if not self._failed:
                self._inner.push(token)
        except Exception as error:
            self._fail(str(error))

    @property
    def finished(self) -> bool:
        return self._failed or self._inner.finished

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._failures.append(reason)


class _OptionalReasoning:
    """A constraint for a model with optional reasoning. The first token decides whether the model reasons."""

    def __init__(self, direct: TokenConstraint, after_reasoning: ConstraintMaker, opener: int) -> None:
        self._active, self._after_reasoning, self._opener = direct, after_reasoning, opener
        self._started = False

    def allowed(self) -> np.ndarray | None:
        mask = self._active.allowed()
        if self._started or mask is None:
            return mask
        mask = mask.copy()
        mask[self._opener] = True
        return mask

    def forces(self, token: int) -> bool:
        return self._started and self._active.forces(token)

    def push(self, token: int) -> None:
        if not self._started and token == self._opener:
            self._active = self._after_reasoning()
        self._started = True
        self._active.push(token)

    @property
    def finished(self) -> bool:
        return self._active.finished


@dataclass(frozen=True, slots=True)
class Expectation:
    """Parameters for parsing the responses to one request (see :meth:`Formats.expectation`)."""

    reasoning: ReasoningParser
    calls: ToolCallParser
    tools: Sequence[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel: bool
    needs_special_tokens: bool  # markers are special tokens, so decoding must keep them
    failures: list[str] = field(default_factory=list)  # grammar errors of the samples

    def reader(self) -> MessageReader:
        """A new parser for one message."""
        return MessageReader(self.reasoning.stream(), self.calls.stream(self.tools, self.tool_choice), self.parallel)


@dataclass(slots=True)
class MessageReader:
    """Incrementally splits the text of one message into reasoning, content and tool calls."""

    _reasoning: ReasoningStream
    calls: StreamingParser
    _parallel: bool
    _called: bool = field(default=False, init=False)

    def push(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that became final."""
        return self._read(self._reasoning.push(text)) if text else []

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the message."""
        return self._read(self._reasoning.finish()) + self._drop_extra_calls(self.calls.finish())

    def _read(self, deltas: Sequence[ReasoningDelta | ContentDelta]) -> list[Piece]:
        pieces: list[Piece] = []
        for delta in deltas:
            reasoning = isinstance(delta, ReasoningDelta)
            pieces += [delta] if reasoning else self._drop_extra_calls(self.calls.push(delta.text))
        return pieces

    def _drop_extra_calls(self, deltas: Sequence[ContentDelta | ToolCallDelta]) -> list[Piece]:
        """Drop all tool calls after the first call, unless parallel calls are allowed."""
        pieces: list[Piece] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if self._called and not self._parallel:
                    continue
                self._called = True
            pieces.append(delta)
        return pieces
