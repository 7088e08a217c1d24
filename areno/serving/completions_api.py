"""Implements ``POST /v1/completions``: continues raw text or token ids, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areno.serving.errors import bad_field
from areno.serving.request_builder import GenerationJob, build_job, check_ids, check_text
from areno.serving.response_base import ChoiceState, SampledResponse, finite
from areno.serving.schemas import MAX_SAMPLES, CompletionRequest
from areno.serving.service import Service
from areno.serving.token_text import TokenTexts
from areno.text.chat import RenderedPrompt, encode_rendered
from areno.types import GeneratedToken

if TYPE_CHECKING:
    from areno.engine.backend import Backend


def prepare_completion(service: Service, engine: Backend, body: CompletionRequest) -> GenerationJob:
    """Validate a request and encode its prompts. Raises ApiError 400 if a field is invalid."""
    _check(body)
    return build_job(
        body,
        engine,
        _encode(engine, body),
        prompt_field="prompt",
        max_tokens=body.max_tokens or service.config.default_max_tokens,
        seeds=lambda: service.seeds(body.seed, body.samples),
        top_logprobs=body.logprobs or 0,
    )


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise bad_field("suffix", "insertion before a suffix is not supported; omit suffix")
    if body.best_of is not None and body.best_of != body.samples:
        raise bad_field(
            "best_of",
            f"{body.best_of} differs from n={body.samples}, but selecting the best samples is not supported; omit best_of",
        )
    if body.echo and body.logprobs is not None:
        raise bad_field("echo", "prompt log-probs are not supported; omit echo or logprobs")


def _encode(engine: Backend, body: CompletionRequest) -> list[list[int]]:
    """Return the token ids of the prompts. Text gets a BOS token if the tokenizer adds a BOS token by default."""
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not prompts:
        raise bad_field("prompt", "the list is empty; send at least one prompt")
    if isinstance(prompts[0], int):
        prompts = [prompts]
    if len(prompts) * body.samples > MAX_SAMPLES:
        message = f"{len(prompts)} prompts with n={body.samples} exceed {MAX_SAMPLES} samples; send fewer prompts"
        raise bad_field("prompt", message, code="too_many_samples")
    if isinstance(prompts[0], str):
        for text in prompts:
            check_text(text, "prompt")
        return encode_rendered(engine.tokenizer, [RenderedPrompt(text, templated=False) for text in prompts])
    for prompt in prompts:
        check_ids("prompt", prompt, engine.vocab_size)
    return prompts


class CompletionResponse(SampledResponse):
    """Builds the text completion response to one request."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: GenerationJob, model: str, texts: TokenTexts) -> None:
        super().__init__(job, model, texts)
        assert isinstance(job.body, CompletionRequest)
        self._body = job.body
        self._content = [[self._echo(sample.index)] for sample in self._samples]
        self._echoed = [len(texts[0]) for texts in self._content]

    def _echo(self, sample: int) -> str:
        if not self._body.echo:
            return ""
        prompt: Any = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], str):
            return str(prompt[sample // self._body.samples])
        return str(self._job.engine.tokenizer.decode(self._job.prompt_of(sample), skip_special_tokens=False))

    def opening(self) -> list[dict[str, Any]]:
        """Return one chunk per choice, with the prompt's text if ``echo`` is set, and with the prompt's token ids if
        ``return_token_ids`` is set. The list is empty if neither is set."""
        if not (self._body.echo or self._body.return_token_ids):
            return []
        return [
            self._chunk_envelope([self._choice(sample, self._content[sample.index][0], range(0), first=True)])
            for sample in self._samples
        ]

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[dict[str, Any]]:
        """Add tokens of a sample. Return a list with the chunk to stream, or an empty list if there is nothing to stream.

        Text that may be the beginning of a stop string is held back until more tokens arrive. When the sample ends, the chunk
        has the finish reason.
        """
        state = self._samples[sample]
        text = state.take(tokens)
        self._content[sample].append(text)
        if not self._body.stream or (not text and state.finish is None):
            return []
        return [self._chunk_envelope([self._choice(state, text, state.next_unsent())])]

    def complete(self) -> dict[str, Any]:
        """Return the complete, non-streamed response."""
        return self._envelope(
            [self._choice(s, "".join(self._content[s.index]), range(len(s.tokens)), first=True) for s in self._samples]
        )

    def _choice(self, sample: ChoiceState, text: str, positions: range, *, first: bool = False) -> dict[str, Any]:
        return {
            "index": sample.index,
            "text": text,
            "logprobs": self._logprobs(sample, positions) if self._body.logprobs is not None and positions else None,
            "finish_reason": sample.finish,
            **self._token_ids(sample, positions, first),
        }

    def _logprobs(self, sample: ChoiceState, positions: range) -> dict[str, Any]:
        tokens = [sample.tokens[position] for position in positions]
        name = self._texts.name
        tops = [{name(other): finite(logprob) for other, logprob in token.top} for token in tokens]
        return {
            "tokens": [name(token.token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": tops if self._body.logprobs else None,
            "text_offset": [self._echoed[sample.index] + sample.offsets[position] for position in positions],
        }
