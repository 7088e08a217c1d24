"""Shared parts of OpenAI responses: usage, log-prob entries, server-sent events, and the objects that contain the choices."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.serving.errors import ApiError
from areno.serving.request_builder import GenerationJob
from areno.serving.token_text import SampleText, TokenTexts
from areno.types import FinishReason, GeneratedToken

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream of the completion endpoints."""


def event(value: dict[str, Any]) -> bytes:
    """Encode one server-sent event. The field ``type`` also becomes the event name."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class ChoiceState:
    """The state of one sample during generation. Each sample is a choice of the response."""

    index: int  # index of the choice
    text: SampleText  # decodes the tokens
    tokens: list[GeneratedToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # character offset of each token in the text
    sent: int = 0  # number of tokens streamed so far
    finish: FinishReason | None = None  # None while the sample runs

    def take(self, tokens: Sequence[GeneratedToken]) -> str:
        """Add tokens, and return the new visible text (see :meth:`SampleText.push`)."""
        self.tokens += tokens
        self.finish = tokens[-1].finish
        text, offsets = self.text.push(tokens)
        self.offsets += offsets
        return text

    def next_unsent(self) -> range:
        """Return the positions of the tokens that have not been sent yet, and mark these tokens as sent."""
        first, self.sent = self.sent, len(self.tokens)
        return range(first, self.sent)


class SampledResponse:
    """Base of chat and text completion responses. Holds the samples, and builds the objects that contain the choices."""

    ending = DONE
    prefix: str  # prefix of the id, such as ``chatcmpl``
    kind: str  # ``object`` of a complete response
    chunk_kind: str  # ``object`` of a chunk

    def __init__(self, job: GenerationJob, model: str, texts: TokenTexts) -> None:
        self.id, self.created, self.model = uuid.uuid4().hex, int(time.time()), model
        self.prompt_tokens = sum(len(request.prompt_tokens) for request in job.requests)
        self._job, self._texts = job, texts
        self._head = {"id": f"{self.prefix}-{self.id}", "created": self.created, "model": model}
        count = len(job.requests) * job.body.samples
        self._samples = [ChoiceState(index, job.sample_text()) for index in range(count)]

    def check(self) -> None:
        """Raise ApiError 503 (the server is shutting down) if a sample was cancelled.

        A disconnect also cancels samples, but then the client does not receive the error.
        """
        if any(sample.finish is None for sample in self._samples):
            raise ApiError(503, "the server is shutting down and cancelled this request", code="draining")

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event that reports an error to a streaming client."""
        return error.body

    def closing(self) -> list[dict[str, Any]]:
        """Return the final usage chunk. The list is empty if the client did not request a usage chunk."""
        return [self._chunk_envelope([], self._usage())] if self._job.body.include_usage else []

    def _chunk_envelope(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        counts = {"usage": usage} if self._job.body.include_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **counts}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """Return token counts. The tokens of a prompt are counted once, even if the prompt has several samples."""
        completion = sum(len(sample.tokens) for sample in self._samples)
        prompt = self.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _token_ids(self, sample: ChoiceState, positions: range, first: bool) -> dict[str, list[int]]:
        if not self._job.body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._job.prompt_of(sample.index)} if first else {}
        return {**prompt, "token_ids": [sample.tokens[position].token for position in positions]}


def chat_logprobs(tokens: Sequence[GeneratedToken], texts: TokenTexts) -> dict[str, Any]:
    """Return the field ``logprobs`` of a chat choice: each token with the most likely alternatives."""
    content = [
        {**_entry(t.token, t.logprob, texts), "top_logprobs": [_entry(*other, texts) for other in t.top]}
        for t in tokens
    ]
    return {"content": content}


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, data = texts(token)
    return {"token": text, "logprob": finite(logprob), "bytes": data}


def finite(logprob: float) -> float:
    """Convert a log-prob to a number that JSON can represent. Minus infinity becomes -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)
