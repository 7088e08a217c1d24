"""Builds engine requests from the fields that chat and text completion requests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areno.serving.errors import ApiError, bad_field
from areno.serving.schemas import GenerationBody
from areno.serving.token_text import SampleText
from areno.types import Request, SamplingParams, TokenConstraint

if TYPE_CHECKING:
    from areno.engine.backend import Backend

# Below this temperature, sampling is greedy: scaled logits could overflow, and the most likely token always wins.
_GREEDY_BELOW = 1e-4
# Maximum number of alternatives per request; each takes about a kilobyte until the response is sent.
_MAX_ALTERNATIVES = 2**19
# Replaces top_p=0, which keeps only the most likely token.
_MIN_TOP_P = 1e-9


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, converted to engine requests."""

    body: GenerationBody
    engine: Backend
    requests: list[Request]  # one engine request per prompt
    stop: tuple[str, ...]  # stop strings
    stop_ids: frozenset[int]  # tokens that end a sample
    skip_special_tokens: bool  # whether to exclude special tokens from the text
    context_full: bool = False  # the prompt fills the context; the response is empty, with finish reason ``length``

    def prompt_of(self, sample: int) -> list[int]:
        """Return the prompt tokens of a sample."""
        return self.requests[sample // self.body.samples].prompt_tokens

    def sample_text(self) -> SampleText:
        """Return a new :class:`SampleText`, which converts the tokens of one sample to text."""
        return SampleText(self.engine.tokenizer, self.stop, self.stop_ids, self.skip_special_tokens)


def build_job(
    body: GenerationBody,
    engine: Backend,
    prompts: Sequence[Sequence[int]],
    *,
    prompt_field: str,
    max_tokens: int,
    seeds: Callable[[], list[int]],
    top_logprobs: int = 0,
    skip_special_tokens: bool = True,
    constraint: Callable[[Any], TokenConstraint] | None = None,
    context_limit: int | None = None,
) -> GenerationJob:
    """Validate a request against the model and build the engine requests.

    ``context_limit`` is the maximum number of tokens of a prompt plus its response. A prompt that fills ``context_limit`` gets
    an empty response, without an error. If ``context_limit`` is None, the model's limit applies, and a prompt that fills the
    model's limit raises ApiError 400. ``max_tokens`` is capped by the remaining context.

    Raises ApiError 400 if a value is invalid for this model.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    check_ids("stop_token_ids", body.stop_token_ids or (), engine.vocab_size)
    bias = _bias(body, engine.vocab_size)
    temperature = 1.0 if body.temperature is None else body.temperature
    requests, context_full = [], False
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "the prompt has no tokens; send some text", param=prompt_field)
        context_full = context_limit is not None and len(prompt) >= context_limit
        room = 1 if context_full else _room(engine, len(prompt), prompt_field, context_limit)
        sampling = SamplingParams(
            greedy=temperature < _GREEDY_BELOW,
            temperature=max(temperature, _GREEDY_BELOW),
            top_p=max(1.0 if body.top_p is None else body.top_p, _MIN_TOP_P),
            top_k=body.top_k or -1,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=bias,
            top_logprobs=top_logprobs,
            max_new_tokens=min(max_tokens, room),
            stop=list(stop) or None,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
            skip_special_tokens=skip_special_tokens,
        )
        requests.append(Request(list(prompt), sampling, seeds(), constraint=constraint))
    _check_alternatives(requests, top_logprobs)
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else engine.eos_ids)
    return GenerationJob(body, engine, requests, stop, stop_ids, skip_special_tokens, context_full)


def _check_alternatives(requests: Sequence[Request], top_logprobs: int) -> None:
    tokens = sum(request.n * request.sampling.max_new_tokens for request in requests)
    if tokens * top_logprobs > _MAX_ALTERNATIVES:
        samples = sum(request.n for request in requests)
        raise bad_field(
            "top_logprobs",
            f"{top_logprobs} alternatives for each of {tokens} tokens ({samples} samples) are "
            f"{tokens * top_logprobs}, but the limit is {_MAX_ALTERNATIVES} per request; request fewer samples, tokens or "
            "alternatives",
            code="too_many_logprobs",
        )


def check_text(text: str, param: str) -> None:
    """Check that text can be encoded as UTF-8. Raises ApiError 400 if it contains an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_field(param, f"{text[error.start]!r} is an unpaired surrogate; send valid UTF-8") from error


def check_ids(param: str, ids: Iterable[int], vocabulary: int) -> None:
    """Check that all token ids are in the vocabulary. Raises ApiError 400 for any other id."""
    for token in ids:
        if not 0 <= token < vocabulary:
            raise bad_field(param, f"{token} is not a token id of this model; use ids from 0 to {vocabulary - 1}")


def _bias(body: GenerationBody, vocabulary: int) -> dict[int, float] | None:
    if not body.logit_bias:
        return None
    bias = {}
    for key, value in body.logit_bias.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 12:
            raise bad_field("logit_bias", f"{key[:40]!r} is not a token id; use integers as keys")
        bias[int(key)] = float(value)
    check_ids("logit_bias", bias, vocabulary)
    return bias


def _room(engine: Backend, prompt: int, prompt_field: str, context_limit: int | None) -> int:
    """Return the maximum number of new tokens after a prompt. Raises ApiError 400 if the prompt leaves no room."""
    context = context_limit or engine.context_length
    budget = engine.kv_tokens
    limit = min(context or budget, budget)
    if prompt >= limit:
        why = (
            f"the KV cache holds {budget} tokens (--kv-cache-tokens)"
            if limit == budget and context != budget
            else f"the model's context is {limit} tokens"
        )
        message = f"the prompt has {prompt} tokens and leaves no room for a response, because {why}; shorten the prompt"
        raise ApiError(400, message, param=prompt_field, code="context_length_exceeded")
    return limit - prompt
