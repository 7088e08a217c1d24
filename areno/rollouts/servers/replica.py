"""An inference server as a rollout replica: requests go out as calls, one per sample; weights come as folders.

The calls run in one thread with an event loop. The server is a process of ours, or one that runs already and is only joined.
"""

import asyncio
import functools
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
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet.ranks import PATIENCE_S, DialledStore, Update
from areno.rollouts.servers.calls import Answer, Sample, ServerCalls, TransferCalls
from areno.rollouts.servers.process import ServerProcess
from areno.text.chat import eos_token_ids, load_tokenizer
from areno.text.stop import StopChecker
from areno.types import GeneratedToken, Request, RolloutResult, RolloutSequence, SamplingParams

T = TypeVar("T")

_POLL_S = 0.5
_ABORT_S = 0.1
_HEALTH_S = 10.0
_HEALTHY = 200
_PROBE_ANSWER = 16


class Joined:
    """A server that somebody else has started: its failure can be seen, and nothing be ended."""

    def __init__(self, on_failure: Callable[[EngineError], None]) -> None:
        self.failed, self.pids = False, list[int]()
        self._on_failure = on_failure

    def abandon(self, reason: str) -> None:
        """Take it for failed."""
        if not self.failed:
            self.failed = True
            threading.Thread(target=self._on_failure, args=[EngineError(reason)], daemon=True).start()

    def close(self) -> None:
        """Nothing to end."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose samples are being answered; ``rids`` are those of the samples."""

    request: Request
    rids: list[str]
    future: Future[RolloutResult] = field(default_factory=Future)
    cancelled: bool = False


class ServerReplica:
    """See the module's text.

    Args:
        path: checkpoint that the server has loaded, for its tokenizer.
        url: of the server.
        calls: of its product.
        server: its process, or :class:`Joined`.
        startup_s: how long it may take until it is healthy.
        vocab_size: width of its logits.

    Raises EngineError: the server ended, or was not healthy in time.
    """

    def __init__(
        self,
        path: str,
        url: str,
        calls: ServerCalls,
        server: ServerProcess | Joined,
        *,
        startup_s: float,
        timeout_s: float,
        vocab_size: int,
        api_key: str = "",
    ) -> None:
        self.workers, self.calls = server, calls
        self._adapter, self._version = "", 0  # of the adapter, which the server has no version for
        self.vocab_size = vocab_size
        self.tokenizer = load_tokenizer(tokenizer_of(path))
        check_tokenizer(self.tokenizer, path, option="--ckpt")
        self.eos_ids = eos_token_ids(self.tokenizer, base_of(path))
        self._open: dict[Future[RolloutResult], _Open] = {}
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._load = EngineLoad()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A pool without limit: the server decides how many samples run at once. Connections rest for less than the 5 s after
        # which uvicorn closes them, so that none is used while it is being closed.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits, trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="areno-calls", daemon=True)
        self._thread.start()
        try:
            self._wait_healthy(startup_s)
            served = self.call(calls.describe(self._http))
        except BaseException:
            self.close()
            raise
        self.context_length, self.kv_tokens = served.context_length, 2**62  # the server queues what does not fit
        self._begin(self._watch_health())

    # -- generating ------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """See :meth:`Engine.submit`."""
        requests = fitted(requests, self.context_length, self.vocab_size, self.kv_tokens)
        if any(request.constraint is not None for request in requests):
            raise UsageError(
                f"{self.calls.product} replicas follow no grammar; leave tool_choice and response_format out"
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
        """Answer one request with what it has so far."""
        with self._lock:
            entry = self._open.get(future)
        if entry is not None and not entry.cancelled:
            entry.cancelled = True
            self._begin(self._abort(entry))

    async def _abort(self, entry: _Open) -> None:
        """Again until the answer is there, because what a server has not begun yet it may begin after the abort."""
        while not entry.future.done():
            with suppress(EngineError):  # a server that is gone has ended it too
                await self.calls.abort(self._http, entry.rids)
            await asyncio.sleep(_ABORT_S)

    def load(self) -> EngineLoad:
        """What has been asked for and answered; what the server does with it is its own matter."""
        with self._lock:
            running = sum(entry.request.n for entry in self._open.values())
            return EngineLoad(running=running, generated_total=self._load.generated_total)

    def keep_contexts(self, wanted: bool) -> None:
        """The server's prefix cache is set when it is started."""

    async def _answer(self, entry: _Open) -> None:
        request, adapter, version = entry.request, self._adapter, self._version
        samples = [
            Sample(rid=rid, prompt=request.prompt_tokens, sampling=request.sampling, seed=seed, adapter=adapter)
            for rid, seed in zip(entry.rids, request.seeds, strict=True)
        ]
        try:
            answers = await asyncio.gather(*(self.calls.generate(self._http, sample) for sample in samples))
            for answer in answers if adapter else ():  # a sample keeps the adapter that it began with
                answer.versions = [version] * len(answer.tokens)
            sequences = [self._heard(entry, index, answer) for index, answer in enumerate(answers)]
        except Exception as error:
            known = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            await self._blame(known)
            self._end(entry, known)
        else:
            self._end(entry, RolloutResult(sequences))

    async def _blame(self, error: EngineError) -> None:
        """Give the server up where it is the cause, before anybody hears of the error: others then take the request over."""
        if self.workers.failed or await self._healthy():
            return
        self.workers.abandon(str(error))
        deadline = time.monotonic() + _HEALTH_S
        while not self.workers.failed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _heard(self, entry: _Open, index: int, answer: Answer) -> RolloutSequence:
        """The sequence; a listener is told of its tokens now, because they come as a whole."""
        sampling, listener = entry.request.sampling, entry.request.listener
        checker = StopChecker(self.tokenizer, sampling.stop or [], sampling.skip_special_tokens)
        for token in answer.tokens:
            checker.push(token)
        sequence = answer.sequence(sampling, checker.text)
        last = len(answer.tokens) - 1
        for place, token in enumerate(answer.tokens if listener is not None else ()):
            finish = sequence.finish_reason if place == last else None
            top = answer.top[place] if answer.top else []
            listener(index, GeneratedToken(token, answer.logprobs[place], top, answer.versions[place], finish))  # type: ignore[misc]
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
        """Bring the weights of a checkpoint to the server; returns the seconds that took. Raises EngineError."""
        began = time.perf_counter()
        if adapter:
            name = f"{adapter}-v{version}"
            self.call(self.calls.load_adapter(self._http, name, folder, self._adapter))
            self._adapter, self._version = name, version
        else:
            self.call(self.calls.load_weights(self._http, folder, version))
        return time.perf_counter() - began

    @property
    def transfers(self) -> bool:
        """Whether its server takes weights from a broadcast."""
        return isinstance(self.calls, TransferCalls) and self.calls.transfers

    def world_size(self) -> int:
        """Workers of its server. Raises EngineError."""
        return self.call(self._transfer.world_size(self._http))

    def join_group(self, where: DialledStore, first: int, size: int) -> None:
        """Have the server's workers join a group of ``size``, as its members from ``first`` on. Raises EngineError."""
        self.call(self._transfer.join_group(self._http, (where.host, where.port), first, size, PATIENCE_S))

    def receive(self, update: Update) -> float:
        """Take over what is broadcast; returns the seconds that took. Raises EngineError: the server needs a reload then."""
        began = time.perf_counter()
        self.call(self._transfer.receive(self._http, update.specs, update.bucket_bytes, update.version))
        return time.perf_counter() - began

    @property
    def _transfer(self) -> TransferCalls:
        assert isinstance(self.calls, TransferCalls)
        return self.calls

    def probe(self, prompt: list[int], version: int) -> tuple[list[int], list[float]]:
        """Token ids, and what the server gives as the log-probs of the last of them.

        Those of the prompt; with an adapter those of an answer, since vLLM 0.32 on CPUs dies of prompt log-probs beside other
        requests of an adapter.
        """
        if not self._adapter:
            return prompt, self.call(self.calls.logprobs(self._http, prompt))
        sampling = SamplingParams(max_new_tokens=_PROBE_ANSWER, ignore_eos=True)
        sample = Sample(rid=f"probe-{version}", prompt=prompt, sampling=sampling, seed=version, adapter=self._adapter)
        answer = self.call(self.calls.generate(self._http, sample))
        return [*prompt, *answer.tokens], answer.logprobs

    # -- the server ------------------------------------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a call; must not be used in the thread of the calls."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait_healthy(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self.call(self._healthy()):
            if self.workers.failed:
                raise EngineError(f"the {self.calls.product} server has ended while it started")
            if time.monotonic() > deadline:
                where = f"the {self.calls.product} server at {self._http.base_url}"
                raise EngineError(f"{where} is not healthy within {limit_s:g} s; see its log")
            time.sleep(_POLL_S)

    async def _healthy(self) -> bool:
        with suppress(httpx.HTTPError):
            return (await self._http.get("/health", timeout=_HEALTH_S)).status_code == _HEALTHY
        return False

    async def _watch_health(self) -> None:
        """A server whose engine has died answers, but not as a healthy one; three times make sure."""
        sick = 0
        while not self.workers.failed:
            await asyncio.sleep(_HEALTH_S)
            sick = 0 if await self._healthy() else sick + 1
            if sick == 3:
                self.workers.abandon(f"{self._http.base_url}/health has not answered as healthy three times")

    def close(self) -> None:
        """End the server if it is ours; what is open fails. A second call does nothing."""
        if self._loop.is_closed():
            return
        self.workers.close()
        with self._lock:
            opened = list(self._open.values())
        for entry in opened:
            self._end(entry, EngineError("the replica is closed"))
        self._loop.call_soon_threadsafe(functools.partial(_stop, self._loop))
        self._thread.join()
        self._loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)
