"""What all answers share on the wire: the frame around choices, usage, log-prob entries, server-sent events."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.serving.errors import ApiError
from areno.serving.job import Job
from areno.serving.text import SampleText, TokenTexts
from areno.types import FinishReason, GeneratedToken

DONE = b"data: [DONE]\n\n"
"""Ends a stream."""


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event; protocols that name their events have the name as ``type``."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class Sample:
    """One sample of an answer while it is generated."""

    index: int  # its place among the choices
    text: SampleText  # reads its tokens
    tokens: list[GeneratedToken] = field(default_factory=list)  # what was sampled so far
    offsets: list[int] = field(default_factory=list)  # where the text of each token begins, in characters
    shown: int = 0  # how many of the tokens a stream has reported
    finish: FinishReason | None = None  # why it ended; None while it goes on

    def take(self, tokens: Sequence[GeneratedToken]) -> str:
        """Add tokens; returns the text that became final."""
        self.tokens += tokens
        self.finish = tokens[-1].finish
        text, offsets = self.text.push(tokens)
        self.offsets += offsets
        return text

    def unshown(self) -> range:
        """Places of the tokens that no chunk has reported yet; they count as reported then."""
        first, self.shown = self.shown, len(self.tokens)
        return range(first, self.shown)


class SampledAnswer:
    """What answers of both completion endpoints share: samples, usage, and the objects around choices."""

    ending = DONE
    prefix: str  # of the answer's id, such as ``chatcmpl``
    kind: str  # value of ``object`` of a whole answer
    chunk_kind: str  # and of a chunk

    def __init__(self, job: Job, model: str, texts: TokenTexts) -> None:
        self.id, self.created, self.model = uuid.uuid4().hex, int(time.time()), model
        self.prompt_tokens = sum(len(request.prompt_tokens) for request in job.requests)
        self._job, self._texts = job, texts
        self._head = {"id": f"{self.prefix}-{self.id}", "created": self.created, "model": model}
        count = len(job.requests) * job.body.samples
        self._samples = [Sample(index, job.sample_text()) for index in range(count)]

    def check(self) -> None:
        """Raises ApiError: a sample did not come to its end; only the server cancels one whose client still waits."""
        if any(sample.finish is None for sample in self._samples):
            raise ApiError(503, "the server is shutting down and has cancelled this request", code="draining")

    def closing(self) -> list[dict[str, Any]]:
        """The last chunk, with usage, where the client asked for it."""
        return [self._framed([], self._usage())] if self._job.body.include_usage else []

    def _framed(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        counts = {"usage": usage} if self._job.body.include_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **counts}

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """Token counts; a prompt counts once, however many samples it has."""
        completion = sum(len(sample.tokens) for sample in self._samples)
        prompt = self.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _token_ids(self, sample: Sample, places: range, first: bool) -> dict[str, list[int]]:
        """Token ids of a choice where they were asked for, those of the prompt with its ``first`` chunk."""
        if not self._job.body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._job.prompt_of(sample.index)} if first else {}
        return {**prompt, "token_ids": [sample.tokens[place].token for place in places]}


def chat_logprobs(tokens: Sequence[GeneratedToken], texts: TokenTexts) -> dict[str, Any]:
    """``logprobs`` of a chat choice: each token with the most likely ones at its place."""
    content = [
        {**_entry(t.token, t.logprob, texts), "top_logprobs": [_entry(*other, texts) for other in t.top]}
        for t in tokens
    ]
    return {"content": content}


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, data = texts(token)
    return {"token": text, "logprob": finite(logprob), "bytes": data}


def finite(logprob: float) -> float:
    """A log-prob that JSON can carry: -9999 stands for impossible, as OpenAI has it."""
    return max(logprob, -9999.0)
