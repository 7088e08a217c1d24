"""``POST /v1/completions``: continue texts or token ids as they are, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areno.serving.errors import bad_field
from areno.serving.job import Job, check_ids, check_text, make_job
from areno.serving.schemas import MAX_SAMPLES, CompletionRequest
from areno.serving.service import Service
from areno.serving.text import TokenTexts
from areno.serving.wire import Sample, SampledAnswer, finite
from areno.text.chat import RenderedPrompt, encode_rendered
from areno.types import GeneratedToken

if TYPE_CHECKING:
    from areno.engine.backend import Backend


def prepare_completion(service: Service, engine: Backend, body: CompletionRequest) -> Job:
    """Check a request, and encode its prompts. Raises ApiError: 400, a field cannot work."""
    _check(body)
    return make_job(
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
        raise bad_field("suffix", "text cannot be inserted before a suffix; leave it out")
    if body.best_of is not None and body.best_of != body.samples:
        raise bad_field("best_of", f"{body.best_of} is not n={body.samples}; every sample is returned, so leave it out")
    if body.echo and body.logprobs is not None:
        raise bad_field("echo", "log-probs of the prompt are not reported; leave echo or logprobs out")


def _encode(engine: Backend, body: CompletionRequest) -> list[list[int]]:
    """Token ids of the prompts; texts get the BOS token where the tokenizer has one."""
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not given:
        raise bad_field("prompt", "the list is empty; give at least one prompt")
    if isinstance(given[0], int):
        given = [given]
    if len(given) * body.samples > MAX_SAMPLES:
        message = f"{len(given)} prompts of {body.samples} samples are more than {MAX_SAMPLES}; send fewer"
        raise bad_field("prompt", message, code="too_many_samples")
    if isinstance(given[0], str):
        for text in given:
            check_text(text, "prompt")
        return encode_rendered(engine.tokenizer, [RenderedPrompt(text, templated=False) for text in given])
    for prompt in given:
        check_ids("prompt", prompt, engine.vocab_size)
    return given


class CompletionAnswer(SampledAnswer):
    """The answer to one request."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, model: str, texts: TokenTexts) -> None:
        super().__init__(job, model, texts)
        assert isinstance(job.body, CompletionRequest)
        self._body = job.body
        self._content = [[self._echo(sample.index)] for sample in self._samples]
        self._echoed = [len(texts[0]) for texts in self._content]

    def _echo(self, sample: int) -> str:
        if not self._body.echo:
            return ""
        given: Any = self._body.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[0], str):
            return str(given[sample // self._body.samples])
        return str(self._job.engine.tokenizer.decode(self._job.prompt_of(sample), skip_special_tokens=False))

    def opening(self) -> list[dict[str, Any]]:
        """The prompts, where they are to be repeated or their token ids were asked for."""
        if not (self._body.echo or self._body.return_token_ids):
            return []
        return [
            self._framed([self._choice(sample, self._content[sample.index][0], range(0), first=True)])
            for sample in self._samples
        ]

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[dict[str, Any]]:
        """Take the next tokens; a stream's chunk where they make text final, and at the end."""
        state = self._samples[sample]
        text = state.take(tokens)
        self._content[sample].append(text)
        if not self._body.stream or (not text and state.finish is None):
            return []
        return [self._framed([self._choice(state, text, state.unshown())])]

    def complete(self) -> dict[str, Any]:
        """The whole answer."""
        return self._whole(
            [self._choice(s, "".join(self._content[s.index]), range(len(s.tokens)), first=True) for s in self._samples]
        )

    def _choice(self, sample: Sample, text: str, places: range, *, first: bool = False) -> dict[str, Any]:
        return {
            "index": sample.index,
            "text": text,
            "logprobs": self._logprobs(sample, places) if self._body.logprobs is not None and places else None,
            "finish_reason": sample.finish,
            **self._token_ids(sample, places, first),
        }

    def _logprobs(self, sample: Sample, places: range) -> dict[str, Any]:
        tokens = [sample.tokens[place] for place in places]
        name = self._texts.name
        tops = [{name(other): finite(logprob) for other, logprob in token.top} for token in tokens]
        return {
            "tokens": [name(token.token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": tops if self._body.logprobs else None,
            "text_offset": [self._echoed[sample.index] + sample.offsets[place] for place in places],
        }
