"""Uses an inference server as a rollout replica. One HTTP call generates one sample. The server loads new weights from folders,
or receives them by a broadcast.

All calls run in one thread with an event loop. The server is a process that areno has started, or an external server.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from areno.config.paths import base_of, tokenizer_of
from areno.engine.limits import check_tokenizer, fitted
from areno.engine.rollout.load import EngineLoad
from areno.errors import EngineError
from areno.rollouts.fleet.weight_update import PATIENCE_S, DialledStore, Update
from areno.rollouts.servers.calls import SampleRequest, ServerAnswer, ServerCalls
from areno.rollouts.servers.process import InferenceServerProcess
from areno.rollouts.servers.vllm_client import VllmCalls
from areno.text.chat import eos_token_ids, load_tokenizer
from areno.text.stop import StopChecker
from areno.types import GeneratedToken, Request, RolloutResult, RolloutSequence, SamplingParams

T = TypeVar("T")

_POLL_S = 0.5
_ABORT_S = 0.1
_HEALTH_S = 10.0
_HEALTHY = 200
_PROBE_ANSWER = 16


class ExternalServer:
    """A server that somebody else started. areno detects failures of the server, but does not stop the server."""

    def __init__(self, on_failure: Callable[[EngineError], None]) -> None:
        self.failed, self.pids = False, list[int]()
        self._on_failure = on_failure

    def abandon(self, reason: str) -> None:
        """Mark the server as failed."""
        if not self.failed:
            self.failed = True
            threading.Thread(target=self._on_failure, args=[EngineError(reason)], daemon=True).start()

    def close(self) -> None:
        """Do nothing, because areno does not stop external servers."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request in progress. A separate HTTP call generates each sample of ``request``; ``rids`` has the ids of these calls."""

    request: Request
    rids: list[str]
    future: Future[RolloutResult] = field(default_factory=Future)
    cancelled: bool = False


class ServerReplica:
    """A rollout replica on an inference server.

    Args:
        path: checkpoint that the server has loaded, including the tokenizer.
        url: URL of the server.
        calls: makes the HTTP calls, which differ between vLLM and SGLang.
        server: the server's process, or :class:`ExternalServer`.
        startup_s: time limit in seconds for the server to become healthy.
        vocab_size: width of the model's logits.

    Raises:
        EngineError: the server exited, or was not healthy in time.
    """

    def __init__(
        self,
        path: str,
        url: str,
        calls: ServerCalls,
        server: InferenceServerProcess | ExternalServer,
        *,
        startup_s: float,
        timeout_s: float,
        vocab_size: int,
        api_key: str = "",
    ) -> None:
        self.workers, self.calls = server, calls
        self._adapter, self._version = "", 0  # name and version of the adapter; servers do not version adapters
        self._previous = ""  # name of the adapter before
        self.vocab_size = vocab_size
        self.tokenizer = load_tokenizer(tokenizer_of(path))
        check_tokenizer(self.tokenizer, path, option="--ckpt")
        self.eos_ids = eos_token_ids(self.tokenizer, base_of(path))
        self._open: dict[Future[RolloutResult], _Open] = {}
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._load = EngineLoad()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Unlimited connections: the server decides how many samples run at once. Idle connections expire before uvicorn would
        # close them after 5 s, so that none is used while uvicorn closes it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits, trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="areno-calls", daemon=True)
        self._thread.start()
        try:
            self._wait_healthy(startup_s)
            self.context_length = self.call(calls.describe(self._http))
        except BaseException:
            self.close()
            raise
        self.kv_tokens = 2**62  # the server queues what does not fit
        self._begin(self._watch_health())

    # -- generating ------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """See :meth:`Engine.submit`."""
        requests = fitted(requests, self.context_length, self.vocab_size, self.kv_tokens)
        if any(request.constraint is not None for request in requests):
            raise EngineError(
                f"{self.calls.product} replicas do not support grammars; omit tool_choice and response_format"
            )
        opened = []
        for request in requests:
            number = next(self._numbers)
            entry = _Open(request, [f"{number}-{sample}" for sample in range(request.n)])
            entry.future.set_running_or_notify_cancel()
            with self._lock:
                self._open[entry.future] = entry
            self._begin(self._answer(entry))
            opened.append(entry.future)
        return opened

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort one request. The request's future returns the partial answer."""
        with self._lock:
            entry = self._open.get(future)
        if entry is not None and not entry.cancelled:
            entry.cancelled = True
            self._begin(self._abort(entry))

    async def _abort(self, entry: _Open) -> None:
        """Abort a request.

        The abort is repeated until the request ends, because an abort may miss samples that are still in the server's queue.
        """
        while not entry.future.done():
            with suppress(EngineError):  # an unreachable server no longer processes the request
                await self.calls.abort(self._http, entry.rids)
            await asyncio.sleep(_ABORT_S)

    def load(self) -> EngineLoad:
        """Return the numbers of running samples and generated tokens, as counted by this class. The server is not queried."""
        with self._lock:
            running = sum(entry.request.n for entry in self._open.values())
            return EngineLoad(running=running, generated_total=self._load.generated_total)

    def enable_prefix_cache(self, enabled: bool) -> None:
        """Do nothing, because the server's prefix cache is configured when the server starts."""

    async def _answer(self, entry: _Open) -> None:
        request, adapter, version = entry.request, self._adapter, self._version
        samples = [
            SampleRequest(rid=rid, prompt=request.prompt_tokens, sampling=request.sampling, seed=seed, adapter=adapter)
            for rid, seed in zip(entry.rids, request.seeds, strict=True)
        ]
        try:
            answers = await asyncio.gather(*(self.calls.generate(self._http, sample) for sample in samples))
            self._refuse_partial(entry, answers)
            for answer in answers if adapter else ():  # a sample keeps the adapter that it started with
                answer.versions = [version] * len(answer.tokens)
            sequences = [self._sequence(entry, index, answer) for index, answer in enumerate(answers)]
        except Exception as error:
            failure = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            await self._abandon_if_unhealthy(failure)
            self._end(entry, failure)
            if request.n > 1 and not self.workers.failed:
                with suppress(EngineError):  # the other samples are of no use
                    await self.calls.abort(self._http, entry.rids)
        else:
            self._end(entry, RolloutResult(sequences))

    def _refuse_partial(self, entry: _Open, answers: list[ServerAnswer]) -> None:
        """Raise EngineError if the server aborted an uncancelled request. A partial answer must not be trained on."""
        reasons = {answer.finish_reason for answer in answers} - {"stop", "length"}
        if reasons and not entry.cancelled:
            raise EngineError(
                f"{self.calls.product} ended an answer early (finish reason {', '.join(sorted(reasons))})"
            )

    async def _abandon_if_unhealthy(self, error: EngineError) -> None:
        """Abandon the server if it is unhealthy.

        Call this method before an error is reported to the router. If the server is not marked as failed by then, the router
        does not resubmit the failed request to another replica.
        """
        if self.workers.failed or await self._healthy():
            return
        self.workers.abandon(str(error))
        deadline = time.monotonic() + _HEALTH_S
        while not self.workers.failed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _sequence(self, entry: _Open, index: int, answer: ServerAnswer) -> RolloutSequence:
        """Convert an answer, and pass its tokens to the listener of the request, if there is one.

        The listener gets all tokens at once, because answers are not streamed.
        """
        sampling, listener = entry.request.sampling, entry.request.listener
        checker = StopChecker(self.tokenizer, sampling.stop or [], sampling.skip_special_tokens)
        for token in answer.tokens:
            checker.push(token)
        sequence = answer.sequence(sampling, checker.text)
        last = len(answer.tokens) - 1
        for i, token in enumerate(answer.tokens if listener is not None else ()):
            finish = sequence.finish_reason if i == last else None
            top = answer.top[i] if answer.top else []
            generated = GeneratedToken(
                token, answer.logprobs[i], top, answer.versions[i], finish, cut_mass=sequence.cut_mass
            )
            listener(index, generated)  # type: ignore[misc]
        return sequence

    def _end(self, entry: _Open, outcome: RolloutResult | EngineError) -> None:
        with self._lock:
            if self._open.pop(entry.future, None) is None:
                return
            if isinstance(outcome, RolloutResult):
                self._load.generated_total += sum(len(sequence.resp_tokens) for sequence in outcome.sequences)
        if isinstance(outcome, RolloutResult):
            entry.future.set_result(outcome)
        else:
            entry.future.set_exception(outcome)

    # -- weights ---------------------------------------------------------------------------------------------------

    def take_over(self, folder: Path, version: int, adapter: str = "") -> float:
        """Load the weights of a checkpoint into the server, and return the duration in seconds. Raises EngineError on
        failure."""
        began = time.perf_counter()
        if adapter:
            self.call(self._change_adapter(f"{adapter}-v{version}", folder, version))
        else:
            self.call(self.calls.load_weights(self._http, folder, version))
        return time.perf_counter() - began

    async def _change_adapter(self, name: str, folder: Path, version: int) -> None:
        """Load the adapter ``name`` from ``folder``, and use it for later requests.

        The adapter that was used before stays loaded until the next change, because requests that were sent earlier may arrive
        at the server after the change.
        """
        if self._previous:
            await self.calls.unload_adapter(self._http, self._previous)
            self._previous = ""
        await self.calls.load_adapter(self._http, name, folder)
        self._previous, self._adapter, self._version = self._adapter, name, version

    @property
    def transfers(self) -> bool:
        """Whether the server can receive weights by a broadcast."""
        return isinstance(self.calls, VllmCalls) and self.calls.transfers

    def world_size(self) -> int:
        """Return the number of workers of the server. Raises EngineError on failure."""
        return self.call(self._transfer.world_size(self._http))

    def join_group(self, where: DialledStore, first: int, size: int) -> None:
        """Let the server's workers join a group of ``size`` members. The workers' ranks begin at ``first``.

        Raises EngineError on failure.
        """
        self.call(self._transfer.join_group(self._http, (where.host, where.port), first, size, PATIENCE_S))

    def receive(self, update: Update) -> float:
        """Let the server load weights that the trainer broadcasts. Return the duration in seconds.

        After an EngineError, call :meth:`take_over`, because the server may be paused, and may have only some of the new
        weights.
        """
        began = time.perf_counter()
        self.call(self._transfer.receive(self._http, update.specs, update.bucket_bytes, update.version))
        return time.perf_counter() - began

    @property
    def _transfer(self) -> VllmCalls:
        assert isinstance(self.calls, VllmCalls)
        return self.calls

    def probe(self, prompt: list[int], version: int) -> tuple[list[int], list[float]]:
        """Return token ids, and the server's log-probs of some of these tokens.

        Without an adapter, the tokens are those of the prompt, and all except the first have log-probs. With an adapter, the
        server generates an answer. In this case, the tokens are those of the prompt and the answer, and only the answer tokens
        have log-probs. The prompt is not scored, because vLLM 0.32 on CPUs crashes if it computes prompt log-probs while other
        requests use an adapter.

        If the call to the server fails, this method checks the server's health and raises EngineError. An unhealthy server is
        marked as failed, and is stopped if areno has started the server.
        """
        try:
            if not self._adapter:
                return prompt, self.call(self.calls.logprobs(self._http, prompt))
            sampling = SamplingParams(max_new_tokens=_PROBE_ANSWER, ignore_eos=True)
            sample = SampleRequest(
                rid=f"probe-{version}", prompt=prompt, sampling=sampling, seed=version, adapter=self._adapter
            )
            answer = self.call(self.calls.generate(self._http, sample))
            return [*prompt, *answer.tokens], answer.logprobs
        except EngineError as error:
            self.call(self._abandon_if_unhealthy(error))
            raise

    # -- the server ------------------------------------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a call and wait for its result. Must not be used in the thread of the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait_healthy(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self.call(self._healthy()):
            if self.workers.failed:
                raise EngineError(f"the {self.calls.product} server exited during startup")
            if time.monotonic() > deadline:
                where = f"the {self.calls.product} server at {self._http.base_url}"
                raise EngineError(f"{where} was not healthy within {limit_s:g} s; see the server's log")
            time.sleep(_POLL_S)

    async def _healthy(self) -> bool:
        with suppress(httpx.HTTPError):
            return (await self._http.get("/health", timeout=_HEALTH_S)).status_code == _HEALTHY
        return False

    async def _watch_health(self) -> None:
        sick = 0
        while not self.workers.failed:
            await asyncio.sleep(_HEALTH_S)
            sick = 0 if await self._healthy() else sick + 1
            if sick == 3:
                self.workers.abandon(f"the health check at {self._http.base_url}/health failed three times in a row")

    def close(self) -> None:
        """End all open requests with an error, and stop the server. An external server keeps running. A second call does
        nothing.
        """
        if self._loop.is_closed():
            return
        self.workers.close()
        with self._lock:
            opened = list(self._open.values())
        for entry in opened:
            self._end(entry, EngineError("the replica is closed"))
        self._begin(self._end_calls())
        self._thread.join()
        self._loop.close()

    async def _end_calls(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        try:
            await asyncio.gather(*calls, return_exceptions=True)
            await self._http.aclose()
        finally:
            self._loop.stop()
