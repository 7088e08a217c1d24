"""``POST /v1/chat/completions``: messages through the model's chat template, answers with tool calls and reasoning apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areno.errors import UsageError
from areno.serving.errors import ApiError, bad_field
from areno.serving.formats import Expectation, MessageReader
from areno.serving.job import Job, check_text, make_job
from areno.serving.metrics import ServingMetrics
from areno.serving.recording import ChatPrompt, OpenTurn, Piece, RecordedAnswer, Tape
from areno.serving.schemas import ChatRequest, NamedTool
from areno.serving.service import ServedModel, Service
from areno.serving.text import TokenTexts
from areno.serving.wire import Sample, SampledAnswer, chat_logprobs
from areno.text.chat import RenderedPrompt, encode_rendered, render_generation_prompt
from areno.text.reasoning import ReasoningDelta
from areno.text.tool_calls import ContentDelta
from areno.types import GeneratedToken

if TYPE_CHECKING:
    from areno.engine.backend import Backend


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What the engine shall do, how to read what comes, and who records it."""

    job: Job
    expected: Expectation
    turn: OpenTurn | None = None


def prepare_chat(service: Service, model: ServedModel, body: ChatRequest, tape: Tape | None = None) -> PreparedChat:
    """Check a request, render and encode its messages, and compile what constrains the answer. Raises ApiError: 400."""
    _check(body)
    turn, text, tokens = _prompt(service, model.engine, body, tape)
    limit = service.recorder.context_limit if service.recorder is not None else None
    try:
        parallel = body.parallel_tool_calls is not False
        expected = model.formats.expectation(text, _tools(body), _tool_choice(body), parallel)
        constraint = model.formats.constraint(expected, body.response_format)
    except UsageError as error:
        raise ApiError(400, str(error), param=_blamed(body)) from error
    job = make_job(
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
        skip_special_tokens=not expected.needs_special_tokens,
        constraint=constraint,
        context_limit=limit,
    )
    return PreparedChat(job, expected, turn)


def _check(body: ChatRequest) -> None:
    form = body.response_format
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    if form is not None and (form.json_schema is not None) != (form.type == "json_schema"):
        message = "the type json_schema and the field json_schema go together; give both or none"
        raise bad_field("response_format", message)
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise bad_field("tool_choice", "there are no tools to choose from; give tools")
    if form is not None and form.type != "text" and _tool_choice(body) != "none":
        message = (
            f'an answer of the type {form.type} cannot be a tool call; leave tools out, or send tool_choice "none"'
        )
        raise bad_field("response_format", message)


def _blamed(body: ChatRequest) -> str:
    """The field that a mistake in tools or formats is about."""
    return "response_format" if _tool_choice(body) == "none" and body.response_format is not None else "tools"


def _tools(body: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _tool_choice(body: ChatRequest) -> str | dict[str, Any]:
    """In the form that parsers take; without tools nothing can be called."""
    choice = (body.tool_choice or "auto") if body.tools else "none"
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


def _prompt(
    service: Service, engine: Backend, body: ChatRequest, tape: Tape | None
) -> tuple[OpenTurn | None, str, list[int]]:
    """The turn that is recorded, and text and tokens of the prompt."""
    # Also with tool_choice "none" the model sees the tools: a conversation that has called some must keep its meaning.
    tools = _tools(body)
    messages = [message.plain() for message in body.messages]

    def render(given: list[dict[str, Any]], add_generation_prompt: bool) -> RenderedPrompt:
        prompt = render_generation_prompt(
            engine.tokenizer,
            given,
            service.config.disable_thinking,
            tools=tools or None,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
        check_text(prompt.text, "messages")
        return prompt

    try:
        if tape is not None:
            turn = tape.open(ChatPrompt(messages=messages, tools=tools, render=render))
            return turn, turn.prompt_text, turn.prompt_tokens
        prompt = render(messages, True)
    except UsageError as error:
        raise ApiError(400, str(error), param="messages") from error
    return None, prompt.text, encode_rendered(engine.tokenizer, [prompt])[0]


@dataclass(slots=True)
class _Message:
    """A message that is being put together."""

    sample: Sample
    reader: MessageReader
    texts: list[str] = field(default_factory=list)  # all that was visible so far
    pieces: list[Piece] = field(default_factory=list)
    record: dict[str, Any] | None = None  # what the recorder says about it
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, piece: Piece) -> dict[str, Any]:
        """Take a piece; returns it as a stream's ``delta``."""
        self.pieces.append(piece)
        if isinstance(piece, ContentDelta):
            return {"content": piece.text}
        if isinstance(piece, ReasoningDelta):
            return {"reasoning_content": piece.text}
        function = {"name": piece.name, "arguments": piece.arguments_piece}
        self.calls.append({"id": piece.id, "type": "function", "function": function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}

    def whole(self) -> dict[str, Any]:
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
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.calls and self.sample.finish == "stop" else self.sample.finish


class ChatAnswer(SampledAnswer):
    """The answer to one request; ``metrics`` counts the calls that could not be read."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, prepared: PreparedChat, model: str, texts: TokenTexts, metrics: ServingMetrics) -> None:
        super().__init__(prepared.job, model, texts)
        assert isinstance(prepared.job.body, ChatRequest)
        self._body, self._expected, self._turn = prepared.job.body, prepared.expected, prepared.turn
        self._metrics = metrics
        self._messages = [_Message(sample, self._expected.reader()) for sample in self._samples]

    def check(self) -> None:
        """Raises ApiError: the answer is not complete."""
        if self._expected.failures:
            message = f"the form of the answer cannot be followed: {self._expected.failures[0]}; simplify the schema"
            raise ApiError(400, message, param=_blamed(self._body), code="grammar_failed")
        super().check()

    def opening(self) -> list[dict[str, Any]]:
        """The role of each message."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(message, delta, range(0), first=True) for message in self._messages]

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[dict[str, Any]]:
        """Take the next tokens; a stream's chunks where they make something certain, and at the end."""
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
        chunks = [self._chunk(message, delta, message.sample.unshown()) for delta in deltas]
        return [*chunks, self._last_chunk(message)] if ends else chunks

    def without_tokens(self) -> list[dict[str, Any]]:
        """End every message before its first token, where the context is full; the chunks of a stream."""
        for message in self._messages:
            message.sample.finish = "length"
            self._record(message)
        return [*self.opening(), *(self._last_chunk(message) for message in self._messages)]

    def _last_chunk(self, message: _Message) -> dict[str, Any]:
        return self._recorded(self._chunk(message, {}, message.sample.unshown(), finish=message.finish_reason), message)

    def _record(self, message: _Message) -> None:
        """Keep a message that has come to its end, before the client can go on from it."""
        finish, tokens = message.sample.finish, message.sample.tokens
        if self._turn is None or finish is None:
            return
        sampling = self._job.requests[0].sampling
        message.record = self._turn.end(
            RecordedAnswer(
                message=message.whole(),
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

    def _recorded(self, answer: dict[str, Any], message: _Message) -> dict[str, Any]:
        return answer if message.record is None else {**answer, "areno": message.record}

    def complete(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {"index": message.sample.index, "message": message.whole(), "finish_reason": message.finish_reason}
            | self._details(message.sample, range(len(message.sample.tokens)), first=True)
            for message in self._messages
        ]
        if len(choices) > 1:  # one alone is described beside them, as clients expect it
            choices = [self._recorded(*pair) for pair in zip(choices, self._messages, strict=True)]
        return self._recorded(self._whole(choices), self._messages[0])

    def _chunk(
        self, message: _Message, delta: dict[str, Any], places: range, *, finish: str | None = None, first: bool = False
    ) -> dict[str, Any]:
        choice = {"index": message.sample.index, "delta": delta, "finish_reason": finish}
        return self._framed([choice | self._details(message.sample, places, first=first)])

    def _details(self, sample: Sample, places: range, *, first: bool) -> dict[str, Any]:
        """What a choice says about its tokens at some places."""
        tokens = [sample.tokens[place] for place in places]
        wanted = self._body.logprobs and (tokens or not self._body.stream)
        logprobs = chat_logprobs(tokens, self._texts) if wanted else None
        return {"logprobs": logprobs, **self._token_ids(sample, places, first)}
