"""Implements ``POST /v1/chat/completions``: renders prompts, and splits responses into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areno.errors import UsageError
from areno.serving.errors import ApiError, bad_field
from areno.serving.formats import Expectation, MessageReader
from areno.serving.metrics import ServingMetrics
from areno.serving.recording import ChatPrompt, OpenTurn, Piece, RecordedSample, SessionRecorder
from areno.serving.request_builder import GenerationJob, build_job, check_text
from areno.serving.response_base import ChoiceState, SampledResponse, chat_logprobs
from areno.serving.schemas import ChatRequest, NamedTool
from areno.serving.service import ServedModel, Service
from areno.serving.token_text import TokenTexts
from areno.text.chat import RenderedPrompt, encode_rendered, render_generation_prompt
from areno.text.reasoning import ReasoningDelta
from areno.text.tool_calls import ContentDelta
from areno.types import GeneratedToken

if TYPE_CHECKING:
    from areno.engine.backend import Backend


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A validated chat request: ``job`` has the engine requests, and ``expected`` specifies how to parse the response.

    ``turn`` is the recorder's entry for the request; None if conversations are not recorded.
    """

    job: GenerationJob
    expected: Expectation
    turn: OpenTurn | None = None


def prepare_chat(
    service: Service, model: ServedModel, body: ChatRequest, recorder: SessionRecorder | None = None
) -> PreparedChat:
    """Validate a request, encode its messages, and compile its grammar. Raises ApiError 400 if the request is invalid."""
    _check(body)
    turn, text, tokens = _prompt(service, model.engine, body, recorder)
    recording = service.recorder
    limit = recording.context_limit if recording is not None else None
    keeps_special = recording is not None and not recording.sampling.skip_special_tokens
    try:
        parallel = body.parallel_tool_calls is not False
        expected = model.formats.expectation(text, _tools(body), _tool_choice(body), parallel)
        constraint = model.formats.constraint(expected, body.response_format)
    except UsageError as error:
        raise ApiError(400, str(error), param=_format_param(body)) from error
    job = build_job(
        body,
        model.engine,
        [tokens],
        prompt_field="messages",
        max_tokens=body.max_completion_tokens or body.max_tokens or service.config.default_max_tokens,
        seeds=lambda: (
            turn.seeds(body.samples)
            if turn is not None and body.seed is None
            else service.seeds(body.seed, body.samples)
        ),
        top_logprobs=body.top_logprobs or 0,
        skip_special_tokens=not (keeps_special or expected.needs_special_tokens),
        constraint=constraint,
        context_limit=limit,
    )
    return PreparedChat(job, expected, turn)


def _check(body: ChatRequest) -> None:
    form = body.response_format
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "the field requires logprobs; set logprobs to true")
    if form is not None and (form.json_schema is not None) != (form.type == "json_schema"):
        message = "the type json_schema and the field json_schema must be used together; send both or neither"
        raise bad_field("response_format", message)
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise bad_field("tool_choice", "the field requires tools; send tools, or omit tool_choice")
    if form is not None and form.type != "text" and _tool_choice(body) != "none":
        message = f'the type {form.type} cannot be combined with tool calls; omit tools, or send tool_choice "none"'
        raise bad_field("response_format", message)


def _format_param(body: ChatRequest) -> str:
    return "response_format" if _tool_choice(body) == "none" and body.response_format is not None else "tools"


def _tools(body: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _tool_choice(body: ChatRequest) -> str | dict[str, Any]:
    choice = (body.tool_choice or "auto") if body.tools else "none"
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


def _prompt(
    service: Service, engine: Backend, body: ChatRequest, recorder: SessionRecorder | None
) -> tuple[OpenTurn | None, str, list[int]]:
    """Return three values: the recorder's :class:`OpenTurn` (None without a recorder), the prompt's text, and its token ids."""
    # The model sees the tools even with tool_choice "none": earlier turns of the conversation may have called them.
    tools = _tools(body)
    messages = [message.plain() for message in body.messages]

    def render(conversation: list[dict[str, Any]], add_generation_prompt: bool) -> RenderedPrompt:
        prompt = render_generation_prompt(
            engine.tokenizer,
            conversation,
            service.config.disable_thinking,
            tools=tools or None,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
        check_text(prompt.text, "messages")
        return prompt

    try:
        if recorder is not None:
            turn = recorder.open(ChatPrompt(messages=messages, tools=tools, render=render))
            return turn, turn.prompt_text, turn.prompt_tokens
        prompt = render(messages, True)
    except UsageError as error:
        raise ApiError(400, str(error), param="messages") from error
    return None, prompt.text, encode_rendered(engine.tokenizer, [prompt])[0]


@dataclass(slots=True)
class _PartialMessage:
    sample: ChoiceState
    reader: MessageReader
    texts: list[str] = field(default_factory=list)  # visible text so far
    pieces: list[Piece] = field(default_factory=list)
    record: dict[str, Any] | None = None  # the recorder's metadata
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, piece: Piece) -> dict[str, Any]:
        self.pieces.append(piece)
        if isinstance(piece, ContentDelta):
            return {"content": piece.text}
        if isinstance(piece, ReasoningDelta):
            return {"reasoning_content": piece.text}
        function = {"name": piece.name, "arguments": piece.arguments_piece}
        self.calls.append({"id": piece.id, "type": "function", "function": function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}

    def as_dict(self) -> dict[str, Any]:
        content, reasoning = self._joined(ContentDelta), self._joined(ReasoningDelta)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self.calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _joined(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, kind))

    @property
    def finish_reason(self) -> str | None:
        return "tool_calls" if self.calls and self.sample.finish == "stop" else self.sample.finish


class ChatResponse(SampledResponse):
    """Builds the chat response to one request. Malformed tool calls are counted in ``metrics``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, prepared: PreparedChat, model: str, texts: TokenTexts, metrics: ServingMetrics) -> None:
        super().__init__(prepared.job, model, texts)
        assert isinstance(prepared.job.body, ChatRequest)
        self._body, self._expected, self._turn = prepared.job.body, prepared.expected, prepared.turn
        self._metrics = metrics
        self._messages = [_PartialMessage(sample, self._expected.reader()) for sample in self._samples]

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunk of each choice, which sets the role of the message to ``assistant``."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(message, delta, range(0), first=True) for message in self._messages]

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[dict[str, Any]]:
        """Add tokens of a sample, and return the chunks to stream. The list is empty if the response is not streamed.

        Each chunk has reasoning, text or a tool call. Text that may be the beginning of a stop string, or of a marker of
        reasoning or tool calls, is held back until more tokens arrive. When the sample ends, a last chunk with the finish
        reason follows.
        """
        message = self._messages[sample]
        text = message.sample.take(tokens)
        message.texts.append(text)
        pieces = message.reader.push(text)
        ends = message.sample.finish is not None
        if ends:
            pieces += message.reader.finish()
            self._metrics.malformed_tool_calls.inc(message.reader.calls.malformed)
        deltas = [message.add(piece) for piece in pieces]
        if ends:
            self._record(message)
        if not self._body.stream:
            return []
        chunks = [self._chunk(message, delta, message.sample.next_unsent()) for delta in deltas]
        return [*chunks, self._last_chunk(message)] if ends else chunks

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the first choice of the response. None if no stop string ended this choice."""
        sample = self._samples[0]
        return sample.text.stop_string if sample.finish == "stop" else None

    def without_tokens(self) -> list[dict[str, Any]]:
        """Return the chunks for a prompt that fills the context: empty messages with the finish reason ``length``."""
        for message in self._messages:
            message.sample.finish = "length"
            self._record(message)
        return [*self.opening(), *(self._last_chunk(message) for message in self._messages)]

    def _last_chunk(self, message: _PartialMessage) -> dict[str, Any]:
        return self._with_record(
            self._chunk(message, {}, message.sample.next_unsent(), finish=message.finish_reason), message
        )

    def _record(self, message: _PartialMessage) -> None:
        """Record a finished message.

        Must be called before the client receives the end of the message, because the client may then continue the conversation.
        """
        finish, tokens = message.sample.finish, message.sample.tokens
        if self._turn is None or finish is None:
            return
        sampling = self._job.requests[0].sampling
        message.record = self._turn.end(
            RecordedSample(
                message=message.as_dict(),
                tokens=tokens,
                finish=finish,
                by_token=finish == "stop" and tokens[-1].token in self._job.stop_ids,
                temperature=sampling.logprob_temperature,
                text="".join(message.texts),
                offsets=message.sample.offsets,
                pieces=message.pieces,
                closer=self._expected.reasoning.closer,
                response_id=self.id,
            )
        )

    def _with_record(self, response: dict[str, Any], message: _PartialMessage) -> dict[str, Any]:
        return response if message.record is None else {**response, "areno": message.record}

    def complete(self) -> dict[str, Any]:
        """Return the complete, non-streamed response."""
        choices = [
            {"index": message.sample.index, "message": message.as_dict(), "finish_reason": message.finish_reason}
            | self._details(message.sample, range(len(message.sample.tokens)), first=True)
            for message in self._messages
        ]
        if len(choices) > 1:  # the record of a single choice is at the top level, where clients expect it
            choices = [self._with_record(*pair) for pair in zip(choices, self._messages, strict=True)]
        return self._with_record(self._envelope(choices), self._messages[0])

    def _chunk(
        self,
        message: _PartialMessage,
        delta: dict[str, Any],
        positions: range,
        *,
        finish: str | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        choice = {"index": message.sample.index, "delta": delta, "finish_reason": finish}
        return self._chunk_envelope([choice | self._details(message.sample, positions, first=first)])

    def _details(self, sample: ChoiceState, positions: range, *, first: bool) -> dict[str, Any]:
        tokens = [sample.tokens[position] for position in positions]
        has_logprobs = self._body.logprobs and (tokens or not self._body.stream)
        logprobs = chat_logprobs(tokens, self._texts) if has_logprobs else None
        return {"logprobs": logprobs, **self._token_ids(sample, positions, first)}
