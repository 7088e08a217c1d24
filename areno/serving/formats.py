"""The reasoning and tool-call formats of a model, and the grammars that constrain its responses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areno.serving.recording import Piece
from areno.serving.schemas import ResponseFormat
from areno.text import grammar
from areno.text.grammar import ConstraintFactory, OptionalReasoning
from areno.text.reasoning import ReasoningDelta, ReasoningParser, ReasoningStream, reasoning_parser_for
from areno.text.tool_calls import ContentDelta, StreamingParser, ToolCallDelta, ToolCallParser, parser_for

if TYPE_CHECKING:
    from areno.engine.backend import Backend


class Formats:
    """The reasoning and tool-call formats of one model. Raises UsageError if the name of a format is unknown."""

    def __init__(self, engine: Backend, tool_call_parser: str, reasoning_parser: str) -> None:
        self._engine = engine
        self._calls = parser_for(engine.tokenizer, tool_call_parser)
        self._reasoning = reasoning_parser_for(engine.tokenizer, reasoning_parser)
        tokenizer = engine.tokenizer
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}

    def expectation(
        self, prompt: str, tools: Sequence[dict[str, Any]], tool_choice: str | dict[str, Any], parallel: bool
    ) -> Expectation:
        """Return the parameters for parsing the response to a prompt. Raises UsageError if a tool or ``tool_choice`` is
        invalid."""
        reasoning = self._reasoning.after_prompt(prompt)
        markers = (*reasoning.markers, *(self._calls.markers if tool_choice != "none" else ()))
        # A reasoning format without an opening marker (harmony) uses special tokens.
        structured = reasoning.name != "none" and not reasoning.opener
        special = structured or any(token in marker for marker in markers for token in self._special)
        expected = Expectation(reasoning, self._calls, tools, tool_choice, parallel, special)
        expected.reader()  # validates the tools
        return expected

    def constraint(self, expected: Expectation, form: ResponseFormat | None) -> ConstraintFactory | None:
        """Return a function that creates the grammar constraint of one sample. None if the response is not constrained.

        Raises UsageError if a schema is invalid or unsupported.
        """
        make = self._maker(expected, form)
        return None if make is None else self._with_reasoning(make, expected.reasoning)

    def _with_reasoning(self, make: Callable[..., ConstraintFactory], reasoning: ReasoningParser) -> ConstraintFactory:
        if reasoning.starts_inside:
            return make(after=reasoning.closer)
        text = reasoning.opener
        ids = self._engine.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if len(ids) != 1:
            return make()
        return OptionalReasoning(make(), make(after=reasoning.closer), ids[0])

    def _maker(self, expected: Expectation, form: ResponseFormat | None) -> Callable[..., ConstraintFactory] | None:
        """Return a function that returns a :data:`ConstraintFactory`. None if the response is not constrained.

        The function has an optional argument ``after``: a marker such as ``</think>``. If ``after`` is set, the constraint
        applies only to the text after this marker.
        """
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


@dataclass(frozen=True, slots=True)
class Expectation:
    """Parameters for parsing the responses to one request (see :meth:`Formats.expectation`)."""

    reasoning: ReasoningParser
    calls: ToolCallParser
    tools: Sequence[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel: bool
    needs_special_tokens: bool  # markers are special tokens, so decoding must keep them

    def reader(self) -> MessageReader:
        """Return a new parser for one message."""
        return MessageReader(self.reasoning.stream(), self.calls.stream(self.tools, self.tool_choice), self.parallel)


@dataclass(slots=True)
class MessageReader:
    """Incrementally splits the text of one message into reasoning, content and tool calls."""

    _reasoning: ReasoningStream
    calls: StreamingParser
    _parallel: bool
    _called: bool = field(default=False, init=False)

    def push(self, text: str) -> list[Piece]:
        """Add text of the message. Return the new reasoning, content and tool calls that later text cannot change."""
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
        pieces: list[Piece] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if self._called and not self._parallel:
                    continue
                self._called = True
            pieces.append(delta)
        return pieces
