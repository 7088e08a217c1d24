"""The asynchronous client through which workflows send requests to a :class:`RolloutEngine`.

The client returns every sampled token with its log-prob, and with the version of the weights that sampled the token. If the
weights are updated while an answer is generated, the tokens of the answer have different versions.
"""

import asyncio
import contextvars
import itertools
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areno.config.experiment.generation_sections import GenerationHyperparameters as GenerationSettings
from areno.engine.backend import Generator
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import DataError, EngineError, UsageError
from areno.observability import tracing
from areno.types import Request, RolloutSequence, SamplingParams
from areno.types.routing import RoutingRecord

logger = logging.getLogger(__name__)

StopReason = Literal["stop", "length", "tool_calls", "abort"]


class RolloutEngine(Generator, Protocol):
    """An engine in this process, a group of ranks, or a fleet of replicas."""

    @property
    def version(self) -> int:
        """Version of the loaded weights."""


def sampling_params(gconfig: GenerationSettings, prompt_len: int, context_length: int | None = None) -> SamplingParams:
    """Convert generation settings to sampling parameters for a prompt of ``prompt_len`` tokens.

    ``max_new_tokens`` limits the answer. The prompt and the answer together have at most ``max_tokens`` tokens, and fit into
    the model's context. A ``top_k`` of ``10**8`` or more disables top-k sampling.

    Raises:
        DataError: the prompt leaves no room for an answer.
        UsageError: a setting is unsupported or out of range.
    """
    if gconfig.use_beam_search:
        raise UsageError(
            "gconfig.use_beam_search is not supported, because beam search does not sample; set it to false"
        )
    limit = min(gconfig.max_tokens, context_length or gconfig.max_tokens)
    room = limit - prompt_len
    if room <= 0:
        remedy = "raise gconfig.max_tokens, or " if limit == gconfig.max_tokens else ""
        raise DataError(
            f"a prompt of {prompt_len} tokens leaves no room for an answer within the limit of {limit} tokens; {remedy}set "
            "the data set's max_length to skip long prompts"
        )
    max_new_tokens = min(gconfig.max_new_tokens, room)
    try:
        return SamplingParams(
            greedy=gconfig.greedy,
            top_p=gconfig.top_p,
            top_k=-1 if gconfig.top_k >= 10**8 else gconfig.top_k,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(gconfig.min_new_tokens, max_new_tokens),
            temperature=gconfig.temperature,
            stop=list(gconfig.stop) if gconfig.stop else None,
            stop_token_ids=list(gconfig.stop_token_ids) or None,
            ignore_eos=gconfig.ignore_eos,
            skip_special_tokens=gconfig.skip_special_tokens,
            frequency_penalty=gconfig.frequency_penalty,
        )
    except ValueError as error:
        raise UsageError(f"gconfig: {error}") from error


@dataclass(slots=True)
class ModelRequest:
    """Prompt tokens and generation settings. ``rid`` identifies the request in log and error messages."""

    input_ids: list[int]
    gconfig: GenerationSettings
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class ModelResponse:
    """One answer to a :class:`ModelRequest`."""

    input_tokens: list[int]
    output_tokens: list[int]  # sampled tokens, including a final stop token
    output_logprobs: list[float]  # natural log-prob of each token under the temperature-scaled policy
    output_versions: list[int]  # weight version that sampled each token
    stop_reason: StopReason
    latency: float  # seconds until the answer was complete; equal to ``ttft``, because answers are not streamed
    ttft: float
    temperature: float = 1.0  # temperature of the log-probs; 1 for greedy answers
    stop_ids: frozenset[int] = frozenset()  # tokens that end an answer
    routed_experts: RoutingRecord | None = None  # for all input and output tokens except the last, if recorded

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The sampled tokens. If the last token is a stop token, it is omitted."""
        tokens = self.output_tokens
        return tokens[:-1] if self.stop_reason == "stop" and tokens and tokens[-1] in self.stop_ids else tokens

    @property
    def sequence(self) -> RolloutSequence:
        """The response as a :class:`RolloutSequence`."""
        return RolloutSequence(
            self.output_tokens,
            self.output_logprobs,
            "length" if self.stop_reason == "length" else "stop",
            versions=self.output_versions,
            temperature=self.temperature,
            routed_experts=self.routed_experts,
        )


@dataclass(slots=True)
class Episode:
    """The numbers from which the seeds of an episode's requests are derived.

    If a run is repeated, these numbers are the same, so the seeds are the same too.

    ``sample`` is the index of the sample in its group; None if one request generates all samples of the group.
    ``request_indices`` yields 0 for the episode's first request, then 1, 2 and so on.
    """

    task_id: int
    sample: int | None = None
    request_indices: Iterator[int] = field(default_factory=itertools.count)


EPISODE: contextvars.ContextVar[Episode | None] = contextvars.ContextVar("areno_episode", default=None)
"""The episode of the current coroutine."""


class EngineClient:
    """Sends requests to an engine.

    Args:
        engine: generates the answers.
        seed: base seed. The seeds of a request are derived from the base seed and the :class:`Episode`.
        request_timeout: time limit in seconds for each attempt to answer a request.
        request_retries: number of retries after an engine failure.
        enable_rollout_tracing: log every request and answer.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        seed: int = 0,
        request_timeout: float = 3600.0,
        request_retries: int = 3,
        enable_rollout_tracing: bool = False,
    ) -> None:
        self.engine, self.seed = engine, seed
        self._timeout_s, self._retries, self._tracing = request_timeout, request_retries, enable_rollout_tracing
        self._outside = Episode(-1)  # for requests outside of episodes
        self._keeps = False

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def get_version(self) -> int:
        """Return the version of the loaded weights."""
        return self.engine.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Return one answer to a prompt. Cancelling the coroutine cancels the request in the engine.

        Raises:
            DataError: the prompt leaves no room for an answer.
            EngineError: no attempt succeeded: each attempt timed out, failed or was aborted.
        """
        return (await self.agenerate_group(request, 1))[0]

    async def agenerate_group(self, request: ModelRequest, samples: int) -> list[ModelResponse]:
        """Return ``samples`` answers to one prompt. areno's engine prefills the prompt only once. Raises the errors of
        :meth:`agenerate`."""
        sampling = sampling_params(request.gconfig, len(request.input_ids), self.engine.context_length)
        began = time.monotonic()
        if self._tracing:
            logger.info(
                "request %s: generating %d samples for a prompt of %d tokens",
                request.rid,
                samples,
                len(request.input_ids),
            )
        async with tracing.atrace_session_phase("generate"):
            seeds = await self._seeds(samples)
            sequences = await self._retried(Request(request.input_ids, sampling, seeds), request.rid)
        latency = time.monotonic() - began
        answers = [self._response(request, sampling, sequence, latency) for sequence in sequences]
        if self._tracing:
            for answer in answers:
                result = len(answer.output_tokens), answer.stop_reason, answer.latency
                logger.info("request %s: generated %d tokens (stop reason: %s) in %.3f s", request.rid, *result)
        return answers

    async def _seeds(self, samples: int) -> list[int]:
        episode = EPISODE.get() or self._outside
        request_index = next(episode.request_indices)
        if request_index and episode is not self._outside and not self._keeps:
            # The second request of a sample: from now on, each turn reuses the KV cache of the previous one.
            self._keeps, keep = True, getattr(self.engine, "enable_prefix_cache", None)
            if keep is not None:
                await asyncio.get_running_loop().run_in_executor(None, keep, True)
        if episode.sample is None:
            return [derive_seed(self.seed, episode.task_id, index, request_index) for index in range(samples)]
        own = self.seed, episode.task_id, episode.sample, request_index
        return [derive_seed(*own), *(derive_seed(*own, index) for index in range(1, samples))]

    async def _retried(self, request: Request, rid: str) -> Sequence[RolloutSequence]:
        for attempt in range(1, self._retries + 1):
            try:
                return await self._answer(request, rid)
            except EngineError as error:
                logger.warning(
                    "retrying request %s after an error (retry %d of %d): %s", rid, attempt, self._retries, error
                )
        return await self._answer(request, rid)

    async def _answer(self, request: Request, rid: str) -> Sequence[RolloutSequence]:
        future = self.engine.submit([request])[0]
        try:
            async with asyncio.timeout(self._timeout_s):
                sequences = (await asyncio.wrap_future(future)).sequences
        except TimeoutError as error:
            raise EngineError(
                f"request {rid} got no answer within {self._timeout_s:g} s (rollout.request_timeout)"
            ) from error
        finally:
            if not future.done():
                self.engine.cancel(future)
        if any(sequence.finish_reason == "abort" for sequence in sequences):
            raise EngineError(f"request {rid}: the engine aborted the request")
        return sequences

    def _response(
        self, request: ModelRequest, sampling: SamplingParams, sequence: RolloutSequence, latency: float
    ) -> ModelResponse:
        stop_ids = frozenset(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            eos = getattr(self.engine, "eos_ids", None) or {self.tokenizer.eos_token_id}
            stop_ids |= frozenset(eos) - {None}
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=sequence.resp_tokens,
            output_logprobs=sequence.resp_logprobs,
            output_versions=sequence.versions,
            stop_reason=sequence.finish_reason,
            latency=latency,
            ttft=latency,
            temperature=sampling.logprob_temperature,
            stop_ids=stop_ids,
            routed_experts=sequence.routed_experts,
        )
